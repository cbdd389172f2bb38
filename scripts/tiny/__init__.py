"""How the model coterie-tiny is made; `scripts/train_tiny.py` is the command."""
