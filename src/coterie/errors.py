"""The exceptions that coterie raises.

CoterieError
├── InputError            a value the user gave is wrong; the message names value, place and remedy
│   ├── WireError         bytes from another process do not follow their format
│   ├── TraceError        an activation trace is damaged, alien or inconsistent
│   ├── ProfileError      a profile is damaged, alien or does not fit what it is used for
│   ├── RequestError      a client's request is malformed
│   └── ConfigError       a flag or configuration key is unknown, missing or out of range
├── UnsupportedError      an engine, model or layout that coterie does not handle
├── EngineError           an engine answered wrongly or not at all
│   ├── GoneError         a process that should answer has ended
│   └── UnresumableError  a stream cannot go on at another worker
└── NoWorkerError         no worker can take the request now
"""


class CoterieError(Exception):
    """Base of every error that coterie raises on purpose."""


class InputError(CoterieError):
    """A value given by the user is wrong."""


class WireError(InputError):
    """Bytes from another process do not follow their format."""


class TraceError(InputError):
    """An activation trace is damaged, alien or inconsistent."""


class ProfileError(InputError):
    """A profile is damaged, alien or does not fit what it is used for."""


class ConfigError(InputError):
    """A flag or configuration key is unknown, missing or out of range."""


class RequestError(InputError):
    """A client's request is malformed.

    Attributes:
        param: the field at fault; None where it is the body as a whole.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedError(CoterieError):
    """An engine, model or layout that coterie does not handle."""


class EngineError(CoterieError):
    """An engine answered wrongly or not at all."""


class GoneError(EngineError):
    """A process that should answer has ended: that is certain, and not only likely."""


class UnresumableError(EngineError):
    """A stream cannot go on at another worker; the message says why."""


class NoWorkerError(CoterieError):
    """No worker can take the request now.

    Attributes:
        retry_after_s: whole seconds after which one may.
    """

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
