"""What the gateway needs of an engine, and the engines it knows."""
