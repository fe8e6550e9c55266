"""Certificates for servers of a test, which openssl makes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path


def certificate_for(
    address: str, directory: Path, *others: str, days: int = 1, environment: Mapping[str, str] | None = None
) -> Path:
    """A key and a certificate for an IP address, signed by itself, in one file; the certificate alone is in `<path>.crt`.

    `others`: what else it is valid for, `DNS:localhost`, say. `environment`: of openssl, with another clock, say.
    """
    path = directory / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += [
        "-days",
        str(days),
        "-subj",
        f"/CN={address}",
        "-addext",
        f"subjectAltName={','.join([f'IP:{address}', *others])}",
    ]
    subprocess.run(
        [*command, "-keyout", path, "-out", f"{path}.crt"],
        check=True,
        capture_output=True,
        env={**os.environ, **(environment or {})},
    )
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path
