"""Expert servers as the tests of monitor and clients describe them."""

import hashlib

from coterie.experts.members import Server


def fingerprint(model="tiny"):
    """What the experts of a model of this name are known by."""
    return hashlib.blake2b(model.encode(), digest_size=16).hexdigest()


def server(name, *held, key=None, since=0, experts=8, model="tiny", tokens=16):
    """A server; `held` are the experts of each layer, as texts of digits: "012" are 0, 1 and 2; `key` is its id."""
    return Server(
        id=key or name,
        name=name,
        model=model,
        fingerprint=fingerprint(model),
        url=f"http://127.0.0.1:1/{name}",
        address=f"/dev/shm/coterie-experts-{name}",
        tokens=tokens,
        experts=experts,
        held=tuple(tuple(map(int, layer)) for layer in held),
        since=since,
    )
