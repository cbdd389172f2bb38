"""The process that knows which expert servers there are, and tells the clients.

No request passes through it: while it is away, clients go by what they were told, and by what they see.
"""
