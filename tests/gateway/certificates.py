"""Self-signed certificates for 127.0.0.1."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Certificate:
    """A self-signed certificate for 127.0.0.1, in files."""

    cert: str
    key: str

    @property
    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.cert)

    def spoil(self) -> None:
        Path(self.key).write_text("no key")


def made(folder: Path, *options: str) -> Certificate:
    """A certificate of one day, by the openssl command."""
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "1", "-subj", "/CN=test")
    names = ("-addext", "subjectAltName=IP:127.0.0.1", *(options or ("-noenc",)))
    subprocess.run(
        ["openssl", "req", "-x509", *curve, *names, "-out", cert, "-keyout", key], check=True, capture_output=True
    )
    return Certificate(cert, key)
