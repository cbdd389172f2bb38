"""Set-up shared by all tests."""

from hypothesis import settings

settings.register_profile("coterie", deadline=None)  # no test depends on the speed of the machine
settings.load_profile("coterie")
