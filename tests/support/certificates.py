"""Certificates for servers of a test, which openssl makes."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificate_for(address: str, directory: Path, *others: str) -> Path:
    """A key and a certificate for an IP address, signed by itself, in one file; the certificate alone is in `<path>.crt`.

    `others`: what else it is valid for, `DNS:localhost`, say.
    """
    path = directory / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += [
        "-days",
        "1",
        "-subj",
        f"/CN={address}",
        "-addext",
        f"subjectAltName={','.join([f'IP:{address}', *others])}",
    ]
    subprocess.run([*command, "-keyout", path, "-out", f"{path}.crt"], check=True, capture_output=True)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path
