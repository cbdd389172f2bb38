"""The client side: connections, HTTP, keys, limits and the queue."""
