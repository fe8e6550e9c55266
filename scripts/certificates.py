"""Make an authority and certificates for servers on a private network: ``certificates.py DIRECTORY SERVER...``.

DIRECTORY/ca/ca.crt is for clients; DIRECTORY/SERVER/ has `server.crt` and `server.key`, valid for the host name SERVER and for
this machine. The authority's key is kept nowhere, so that nothing can be signed later: shortly before they expire, the next
run makes all of them anew, and then servers and clients have to be restarted. With OWNER=uid in the environment, the
keys belong to that user.
"""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID = timedelta(days=397)
RENEWED_BEFORE = timedelta(days=30)


def main(directory: Path, servers: list[str]) -> None:
    authority_file = directory / "ca" / "ca.crt"
    if all(_is_current(directory / name / "server.crt", authority_file) for name in servers):
        print("certificates: still valid")  # noqa: T201
        return
    key, authority = ec.generate_private_key(ec.SECP256R1()), _name(f"authority of {datetime.now(UTC):%Y-%m-%d %H:%M}")
    certificate = (
        _builder(authority, authority, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    for name in servers:
        _server(directory / name, name, authority, key)
    _write(authority_file, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    print(f"certificates: made for {', '.join(servers)}")  # noqa: T201


def _server(directory: Path, name: str, authority: x509.Name, signer: ec.EllipticCurvePrivateKey) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [x509.DNSName(name), x509.DNSName("localhost")]
    names += [x509.IPAddress(IPv4Address("127.0.0.1")), x509.IPAddress(IPv6Address("::1"))]
    certificate = (
        _builder(_name(name), authority, key, signer)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(signer, hashes.SHA256())
    )
    _write(
        directory / "server.key",
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        0o600,
    )
    _write(directory / "server.crt", certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey | None = None,
) -> x509.CertificateBuilder:
    now, by = datetime.now(UTC), (signer or key).public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + VALID)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _is_current(path: Path, authority_file: Path) -> bool:
    try:
        certificate, authority = (x509.load_pem_x509_certificate(each.read_bytes()) for each in (path, authority_file))
        certificate.verify_directly_issued_by(authority)
    except (FileNotFoundError, ValueError, InvalidSignature):
        return False
    return certificate.not_valid_after_utc - RENEWED_BEFORE > datetime.now(UTC)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Replace a file, which has its mode from the start."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        os.chmod(new, mode)  # whatever the umask
        file.write(content)
        if "OWNER" in os.environ:
            os.chown(new, int(os.environ["OWNER"]), -1)
    new.replace(path)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: certificates.py DIRECTORY SERVER...")
    main(Path(sys.argv[1]), sys.argv[2:])
