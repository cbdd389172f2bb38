"""The workers: who there are, how they are, and what is checked before they are asked."""
