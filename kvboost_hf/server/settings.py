"""`ServerSettings`: the settings of a server, with its files of TLS and of API keys, and the salts made of keys."""

import glob
import re
import ssl
import stat
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from kvboost_hf.engine.settings import ALIKE
from kvboost_hf.fields import check_bounds, setting

_NAME = re.compile(r"[^\ud800-\udfff]+")  # answers are in UTF-8
_FORMS = {  # of texts that requests are compared with, and what each must be
    "model_name": (_NAME, "a text in UTF-8, and not empty, such as gpt-4o"),
    "model_aliases": (_NAME, "names in UTF-8, such as gpt-4o or gpt-*"),
    "allowed_hosts": (
        re.compile(r"\*|(\*\.)?[\w-]+(\.[\w-]+)*\.?|\[[0-9a-f:.]+\]", re.ASCII | re.IGNORECASE),
        "names without scheme and port, such as model.example, *.example or [2001:db8::1], or *",
    ),
    "cors_origins": (
        re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#@*]+/?", re.IGNORECASE),
        "origins as browsers send them, such as https://page.example:8443, or *",
    ),
}

_DAY_S = 24 * 60 * 60  # threads cannot wait for any time
ACCESS, LOAD, KEYS = "who may ask, and where", "how much at once", "keys"  # groups of flags


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The files of TLS, in the PEM format.

    Args:
        certfile: The server's certificate, and those that vouch for it.
        keyfile: The certificate's private key, whose password a server reads from KVBOOST_HF_SSL_KEYFILE_PASSWORD of
            the environment; None for that in `certfile`.
        password: The password of the key, if it has one.
        ca_certs: Clients must show a certificate that one of these vouches for; None for any client.
    """

    certfile: Path = setting(group=ACCESS, flag="ssl-certfile", metavar="FILE")
    keyfile: Path | None = setting(None, group=ACCESS, flag="ssl-keyfile", metavar="FILE")
    password: str | None = None
    ca_certs: Path | None = setting(None, group=ACCESS, flag="ssl-ca-certs", metavar="FILE")

    def context(self) -> ssl.SSLContext:
        """Make an SSL context for TLS 1.2 or later; `ValueError` for files that are missing, or do not fit."""
        for flag, path in (("certfile", self.certfile), ("keyfile", self.keyfile), ("ca-certs", self.ca_certs)):
            if path is not None and not path.is_file():
                raise ValueError(f"`--ssl-{flag}` must be a file in the PEM format, but there is none at {path}.")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            # Without a password OpenSSL would ask for one at the terminal.
            context.load_cert_chain(self.certfile, self.keyfile, self.password or "")
        except OSError as error:  # that of OpenSSL is one, too
            raise ValueError(
                f"The certificate {self.certfile} and the key {self.keyfile or self.certfile} cannot be used: "
                f"{error}. Pass a certificate and its own key as PEM files, and the key's password if it has one."
            ) from error
        if self.ca_certs is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self.ca_certs)
            except OSError as error:
                raise ValueError(
                    f"`--ssl-ca-certs` must hold certificates in the PEM format, got {self.ca_certs}: {error}."
                ) from error
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How the server answers, and what it refuses.

    Args:
        model_name: What `/v1/models` and answers call the model; requests must name it.
        model_aliases: Other names that requests may give the model; `*` in one stands for any characters.
        host: Address to listen at; 127.0.0.1 serves this machine alone, `::` all addresses of IPv4 and IPv6.
        port: Port to listen at; 0 for any free one.
        api_keys: Any of these opens all routes, as does the key in KVBOOST_HF_API_KEY of the environment of a command;
            without one they are open to everybody who reaches the address.
        operator_keys: Any of these opens all routes, too, and they alone `/v1/stats` and `/metrics`. Without one these
            figures are for whoever has the only API key, and closed where there are several.
        salt: Separates prompts of this server from those of others who share a tier with it.
        allowed_hosts: Names of the server in requests, besides localhost and its address; `"*"` for any. With API
            keys none is needed.
        tls: Certificate and key for HTTPS; None for plain HTTP.
        cors_origins: Web pages from these origins may call the server; `"*"` for all.
        max_batch_size: Requests that run at once.
        max_queue_size: Requests that wait; others get status 429.
        batch_window_ms: Milliseconds that a request waits for others to share its batch with.
        prefill_chunk_size: Tokens of a prompt in one forward; between two, other requests go on.
        max_model_len: Tokens of a prompt and its answer, at most; None for what the model has positions for.
        max_live_tokens: Tokens of all running requests together, at most; None for what has room in memory.
        safety_margin: Share of the memory to leave free; None is no plan.
        embeddings: Answer `/v1/embeddings` by the mean of the last hidden states: poor ones, for lack of training.
        auto_truncate: Cut off the beginning of prompts that are too long, in place of refusing them.
        default_max_tokens: Tokens of an answer, at most, where the request gives no length; None for as many as the
            context has room for.
        timeout_s: Seconds from the arrival of a request until it is given up.
        drain_s: Seconds that requests have left when the server is told to end, a day at most.
        ping_s: A stream that is silent for so many seconds sends a comment, so that no proxy closes it.
        max_body_bytes: Requests with a larger body are refused with status 413.
        body_timeout_s: Seconds for the body of a request to come, then status 408.
        header_timeout_s: Seconds for a request's header to come, from the beginning of a connection or from the end of
            the last answer; then it is dropped.
        write_timeout_s: A connection is dropped whose client reads nothing of an answer for so many seconds.
        max_connections: Connections open at once; three quarters of them from one address. None for what the process
            has descriptors for, up to 4096.
        max_choices: The largest `n` of a request, times its number of prompts.
        strip_heads: Regular expressions: lines that one of them matches as a whole, such as a date, are left out of
            system prompts.
        strict_requests: Refuse requests with unknown fields, in place of ignoring these.

    Raises:
        ValueError: for counts or times that are none, names and keys that are empty or no valid text, and hosts and
            origins that no request has.
    """

    model_name: str = setting(
        group=ACCESS, metavar="NAME", help="what clients call the model (default: its name, or that of its folder)"
    )
    model_aliases: tuple[str, ...] = setting((), group=ACCESS, flag="model-alias", metavar="NAME")
    host: str = setting("127.0.0.1", group=ACCESS)
    port: int = setting(8000, group=ACCESS, least=0, most=2**16 - 1)
    api_keys: tuple[str, ...] = setting((), group=KEYS, flag="api-key", metavar="KEY")
    operator_keys: tuple[str, ...] = ()
    salt: str = setting("", group=ALIKE)
    allowed_hosts: tuple[str, ...] = setting((), group=ACCESS, flag="allowed-host", metavar="NAME")
    tls: TlsFiles | None = None
    cors_origins: tuple[str, ...] = setting((), group=ACCESS, flag="cors-origin", metavar="ORIGIN")
    max_batch_size: int = setting(8, group=LOAD, above=0)
    max_queue_size: int = setting(64, group=LOAD, above=0)
    batch_window_ms: float = setting(0.0, group=LOAD, least=0, most=1000 * _DAY_S)
    prefill_chunk_size: int = setting(256, group=LOAD, metavar="TOKENS", above=0)
    max_model_len: int | None = setting(None, group=LOAD, metavar="TOKENS", least=2)
    max_live_tokens: int | None = setting(None, group=LOAD, metavar="TOKENS", least=2)
    safety_margin: float | None = setting(
        0.15, group=LOAD, flag="planner-safety-margin", metavar="SHARE", least=0, below=1
    )
    embeddings: bool = setting(False, group=ACCESS)
    auto_truncate: bool = setting(False, group=LOAD)
    default_max_tokens: int | None = setting(None, group=LOAD, flag="max-tokens", above=0)
    timeout_s: float = setting(600.0, group=LOAD, above=0)
    drain_s: float = setting(30.0, group=LOAD, least=0, most=_DAY_S)
    ping_s: float = setting(15.0, group=LOAD, above=0)
    max_body_bytes: int = setting(16 * 2**20, group=LOAD, above=0)
    body_timeout_s: float = setting(60.0, group=LOAD, above=0)
    header_timeout_s: float = setting(10.0, group=LOAD, above=0)
    write_timeout_s: float = setting(60.0, group=LOAD, above=0)
    max_connections: int | None = setting(None, group=LOAD, least=2)
    max_choices: int = setting(16, group=LOAD, above=0)
    strip_heads: tuple[str, ...] = setting((), group=ACCESS, flag="strip-head", metavar="PATTERN")
    strict_requests: bool = setting(False, group=ACCESS)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names of the model, without those that have a `*`."""
        return (self.model_name, *(alias for alias in self.model_aliases if "*" not in alias))

    @property
    def max_requests(self) -> int:
        """Requests that run and wait, at most."""
        return self.max_batch_size + self.max_queue_size

    def is_name(self, name: str) -> bool:
        """Whether requests may give the model this name."""
        patterns = ("*".join(map(glob.escape, alias.split("*"))) for alias in self.model_aliases)
        return name == self.model_name or any(fnmatchcase(name, pattern) for pattern in patterns)

    def __post_init__(self) -> None:
        for name in ("api_keys", "operator_keys"):
            if any(not re.fullmatch(r"[ -~]+", key) or key != key.strip() for key in getattr(self, name)):
                raise ValueError(
                    f"`{name}` must be texts of printable ASCII characters, not empty, and without space around them."
                )
        for name, (form, what) in _FORMS.items():
            given = getattr(self, name)
            texts = (given,) if isinstance(given, str) else given
            wrong = next((each for each in texts if not form.fullmatch(each)), None)
            if wrong is not None:
                raise ValueError(f"`{name}` must be {what}, got {wrong!r}.")
        for pattern in self.strip_heads:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"`strip_heads` must be regular expressions, got {pattern!r}: {error}. Escape what is no pattern "
                    "with a backslash."
                ) from error
        check_bounds(self)


def read_keys(path: Path) -> tuple[str, ...]:
    """Read the keys of a file, one a line, without blank lines and those that begin with `#`.

    Raises `ValueError` for a file that others may read or write, that cannot be read, or that holds no key.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"The file of keys {path} cannot be read: {error}. Pass a text file with a key a line."
        ) from error
    require_closed(path, f"file of keys {path}")
    lines = (line.strip() for line in text.splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"The file of keys {path} must hold a key a line, but there is none. Write one into it.")
    return keys


def require_closed(path: Path, what: str) -> None:
    """Raise `ValueError` for a file that other users may read or write; its group may read it."""
    mode = path.stat().st_mode
    if sys.platform != "win32" and mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        raise ValueError(
            f"The {what} must be closed to other users, but its mode is {stat.S_IMODE(mode):04o}. "
            f"Run: chmod 600 {path}"
        )
