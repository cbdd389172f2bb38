"""A request's way over the workers: both legs, what is tried again, and what goes on."""
