"""Checks the header `Host`, so that a foreign web page cannot reach the server by a name of its own."""

import ipaddress
import re
from collections.abc import Sequence

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\[\]:@/?#\s]+)(:[0-9]*)?", re.IGNORECASE)


class Hosts:
    """Tells names of this server from others that lead to its address (DNS rebinding).

    Browsers let a page read what comes from its own name. Whoever owns a name can have it lead to 127.0.0.1 a moment
    later, so that a page of theirs reads what a server there says. Only the header `Host` shows it.

    Args:
        names: That are taken besides those of this machine; `"*"` takes all, `"*.example.org"` all of a domain.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = {name.lower().rstrip(".") for name in names}

    def takes(self, host: str | None, address: str | None) -> bool:
        """Whether a request is for this server.

        Args:
            host: The header; None without one, which no browser leaves out.
            address: At which the connection has arrived, if that is known; a name where there is no connection.
        """
        if "*" in self._names or host is None:
            return True
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found["name"].lower().rstrip(".")
        if name == "localhost" or name.endswith(".localhost") or name in self._names:
            return True
        if address is not None and name == address.lower():
            return True
        if any(each.startswith("*.") and name.endswith(each[1:]) for each in self._names):
            return True
        literal = _ip(name.strip("[]"))
        return literal is not None and (literal.is_loopback or literal == _ip(address))


def _ip(text: str | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address((text or "").partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found
