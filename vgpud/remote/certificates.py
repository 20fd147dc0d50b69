"""Certificates in files: their fingerprints, and why one cannot be used. Needs only the standard library."""

import hashlib
import re
import ssl
import time
from pathlib import Path

from vgpud.model.errors import ErrorCode, VgpuError

AS_ROOT = "call as root"
_VERSION_TAG, _UTC_TIME_TAG = 0xA0, 0x17  # RFC 5280, appendix A
_PEM = re.compile("-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)


def fingerprint(certificate: bytes) -> str:
    """Returns the SHA-256 of a DER certificate in hexadecimal."""
    return hashlib.sha256(certificate).hexdigest()


def fingerprint_of(path: Path) -> str:
    """Returns the fingerprint of the first certificate in a PEM file. Raises VgpuError."""
    return fingerprint(der_of(path))


def client_fingerprint(path: Path, door: str, now_unix_seconds: float) -> str:
    """Returns the fingerprint of a client's certificate. Raises VgpuError if the certificate has expired, if
    it belongs to an authority, or if it is the door's, whose fingerprint is `door`.
    """
    certificate = der_of(path)
    known = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    known.load_verify_locations(cadata=certificate)
    why, found = "", fingerprint(certificate)
    if found == door:
        why = "is the certificate of the door of this node"
    elif known.cert_store_stats()["x509_ca"]:
        why = "is the certificate of an authority"
    elif (
        end := _not_after(certificate)
    ) <= f"{time.strftime('%Y%m%d%H%M%S', time.gmtime(now_unix_seconds))}Z":
        why = f"expired at {end[:4]}-{end[4:6]}-{end[6:8]}T{end[8:10]}:{end[10:12]}:{end[12:]}"
    if why:
        hint = "name a client's certificate, which an authority has signed (docs/remote.md)"
        raise VgpuError(ErrorCode.BAD_REQUEST, f"{path} {why}", hint)
    return found


def _not_after(certificate: bytes) -> str:
    """Returns the end of the validity of a DER certificate that OpenSSL has accepted, as YYYYMMDDHHMMSSZ
    (RFC 5280, 4.1.2.5).
    """
    fields = _parts(_parts(_parts(certificate)[0][1])[0][1])
    # the order is: version (missing in version 1), serial number, algorithm, issuer, validity
    validity = fields[4 if fields[0][0] == _VERSION_TAG else 3][1]
    tag, end = _parts(validity)[1]
    text = end.decode("ascii")
    # a year of two digits is from 1950 to 2049
    return text if tag != _UTC_TIME_TAG else f"{'19' if text >= '5' else '20'}{text}"


def _parts(der: bytes) -> list[tuple[int, bytes]]:
    """Returns the tags and contents of consecutive DER values (X.690, 8.1)."""
    found, at = [], 0
    while at < len(der):
        tag, size, at = der[at], der[at + 1], at + 2
        if size & 0x80:
            more = size & 0x7F
            size, at = int.from_bytes(der[at : at + more], "big"), at + more
        found.append((tag, der[at : at + size]))
        at += size
    return found


def der_of(path: Path) -> bytes:
    """Returns the first certificate of a PEM file in DER. Raises VgpuError."""
    hint = "name a file with a certificate that begins with -----BEGIN CERTIFICATE-----"
    try:
        text = path.read_text()
    except PermissionError:
        raise VgpuError(ErrorCode.NOT_ALLOWED, f"cannot read {path}: permission denied", AS_ROOT) from None
    except OSError as error:
        said = (error.strerror or str(error)).lower()
        raise VgpuError(ErrorCode.BAD_REQUEST, f"cannot read {path}: {said}", hint) from None
    except UnicodeDecodeError:
        raise VgpuError(ErrorCode.BAD_REQUEST, f"{path} is not a text file", hint) from None
    found = _PEM.search(text)
    if found is None and "PRIVATE KEY-----" in text:
        sentence, hint = f"{path} is a private key", "name the file with its certificate"
        raise VgpuError(ErrorCode.BAD_REQUEST, sentence, hint)
    if found is None:
        raise VgpuError(ErrorCode.BAD_REQUEST, f"{path} has no certificate", hint)
    try:
        certificate = ssl.PEM_cert_to_DER_cert(found[0])
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=certificate)
    except (ValueError, OSError):
        raise VgpuError(ErrorCode.BAD_REQUEST, f"the certificate in {path} is damaged", hint) from None
    return certificate


def pair_problem(certificate: Path, key: Path) -> str:
    """Returns a sentence on why OpenSSL refuses a certificate and its key, two files that can be opened."""
    try:
        der_of(certificate)
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except VgpuError as error:
        return error.sentence
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            return f"the key in {key} is not that of the certificate in {certificate}"
    return f"{key} has no private key that can be used"
