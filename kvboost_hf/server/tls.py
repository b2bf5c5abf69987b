"""`TlsFiles`: the certificate of a server, and the authorities of client certificates."""

import ssl
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The files of TLS, in the PEM format.

    Args:
        certfile: The server's certificate, and those that vouch for it.
        keyfile: Its private key; None if it is in `certfile`.
        password: Of the key, if it has one.
        ca_certs: Clients must show a certificate that one of these vouches for; None asks them for none.
    """

    certfile: Path
    keyfile: Path | None = None
    password: str | None = None
    ca_certs: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Make an SSL context for TLS 1.2 or later.

        Raises:
            ValueError: a file is missing, is none of its kind, or does not go with the others.
        """
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
