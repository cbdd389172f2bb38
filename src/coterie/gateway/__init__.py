"""The gateway: one request in, two engine requests out, bytes relayed untouched."""
