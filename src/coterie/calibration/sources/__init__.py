"""The sources of expert counts, one file each."""
