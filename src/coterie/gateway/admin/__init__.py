"""The admin side, and what changes a gateway while it runs."""
