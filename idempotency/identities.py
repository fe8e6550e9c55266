"""Who a person is, by what their company or the owner of a file says, so that people cannot make identities for themselves.

An ID token of OpenID Connect is verified with the issuer's keys; the name is `sub`, which stays the same for a person, unlike an
address. Or a file names people with the hash of each one's token. Not promised: who runs commands with settings of their own,
or writes to the tables, needs neither.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tomllib
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints, TypeAdapter, ValidationError

from .errors import NotAuthenticated, SettingsError
from .extras import extra
from .issuer import IssuerKeys, by_name, signing
from .settings import Settings

# Who only looks; who changes; who also approves what another person has asked for; who also removes people.
Role = Literal["reader", "operator", "approver", "admin"]
ROLES: tuple[Role, ...] = ("reader", "operator", "approver", "admin")
# What the claim with a person's groups has to contain, the more first.
GROUPS: dict[str, Role] = {f"idempotency-{role}": role for role in reversed(ROLES)}
# In the claim with a person's tenants: all of them.
ALL_TENANTS = "*"
# Those with a public key: with a shared one, any service that checks tokens could make them.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
# Seconds for which clocks may differ.
LEEWAY = 30.0
OTHERS = stat.S_IWGRP | stat.S_IWOTH
# Characters; an ID token has about a thousand.
TOKEN_LIMIT = 16 * 1024


class Known(BaseModel):
    """A person of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    role: Role
    token_sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    until: date | None = None  # the last day on which the token is valid, in UTC
    tenants: frozenset[str] | None = None  # whose operations the person may change; None: all

    @property
    def is_over(self) -> bool:
        """Whether the token has expired."""
        return self.until is not None and datetime.now(UTC).date() > self.until


_FILE = TypeAdapter(dict[str, Known])
NAME = "1 to 255 printable characters"
# What no screen shows: Unicode's Default_Ignorable_Code_Point, which Python's tables do not have, and two symbols that are blank.
_IGNORABLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff"
    "\u2800\U0001d159\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a person is, and what they may do. `tenants`: whose operations they may change; None: all.

    `ends_at`: until when the token counts, in seconds since 1970; None: nothing in it says so.
    """

    name: str
    role: Role
    tenants: frozenset[str] | None = None
    ends_at: float | None = None


def may(has: Role, needs: Role) -> bool:
    """Whether someone with the role `has` may do what needs the other one."""
    return ROLES.index(has) >= ROLES.index(needs)


def token_hash(token: str) -> str:
    """What is stored of a token."""
    # 256 random bits need no salt and no slow hash
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def looks_like(name: str) -> str:
    """A form that is equal for names which differ only in case, spaces, Unicode form or in what is not shown: they are the same person's."""
    shown = _IGNORABLE.sub("", unicodedata.normalize("NFKC", _IGNORABLE.sub("", name)))
    return " ".join(unicodedata.normalize("NFKC", shown.casefold()).split())


def is_name(name: str) -> bool:
    """Whether a person may have this name."""
    return 0 < len(name) <= 255 and name.isprintable() and looks_like(name) != ""


def are_outside(settings: Settings) -> bool:
    """Whether the table of operators counts for nothing, because people are known otherwise."""
    return settings.people_file is not None or settings.oidc_issuer is not None


def source(settings: Settings) -> str:
    """What people are known by, for a message."""
    return "idempotency_people_file" if settings.people_file is not None else "idempotency_oidc_issuer"


def known_by(settings: Settings) -> str | None:
    """Where a person's name is defined: the company's issuer, or "file"; None: the database."""
    return "file" if settings.people_file is not None else settings.oidc_issuer


def identify(settings: Settings, token: str) -> Identity:
    """The person whose token this is. Raises `NotAuthenticated`, and `SettingsError` for a file."""
    if settings.people_file is not None:
        return _of_file(known_people(settings.people_file), token)
    return _of_company(settings, token)


def waits_for_issuer(settings: Settings, token: str) -> bool:
    """Whether `identify` may ask the issuer for the key that this token names: it is not kept."""
    address = settings.oidc_keys or ""
    if settings.people_file is not None or settings.oidc_issuer is None or not _is_address(address):
        return False
    try:
        named = _named_key(token)
    except NotAuthenticated:
        return False
    return not _issuer(address, os.getpid()).is_kept(named)


def known_people(path: Path) -> dict[str, Known]:
    """The people of a file, by name. Raises `SettingsError` if others than its owner may write to it, or it is malformed."""
    field = "idempotency_people_file"
    try:
        people = _FILE.validate_python(tomllib.loads(_read_protected(path, field)))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise SettingsError(f"{field}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except ValueError:
        raise SettingsError(f"{field}: is not TOML") from None
    if not all(map(is_name, people)):
        raise SettingsError(f"{field}: a name has {NAME}")
    if len({person.token_sha256 for person in people.values()}) < len(people):
        raise SettingsError(f"{field}: two names have the same token")
    if len({looks_like(name) for name in people}) < len(people):
        raise SettingsError(f"{field}: two names differ only in case, spaces, Unicode form or in what is not shown")
    return people


def _of_file(people: dict[str, Known], token: str) -> Identity:
    digest = token_hash(token)
    for name, person in people.items():
        if person.token_sha256 == digest:
            if person.is_over:
                raise NotAuthenticated(f"the token of {name!r} has expired")
            return Identity(name, person.role, person.tenants)
    raise NotAuthenticated("no person in idempotency_people_file has this token")


def _of_company(settings: Settings, token: str) -> Identity:
    with extra("oidc"):
        import jwt
    named = _named_key(token)
    try:
        believed: dict[str, Any] = jwt.decode_complete(
            token,
            _key(settings, named),
            algorithms=list(ALGORITHMS),
            audience=settings.oidc_audience,
            issuer=settings.oidc_issuer,
            leeway=LEEWAY,
            options={"require": ["exp", "iat", "iss", "aud", "sub"]},
        )
    except jwt.PyJWKClientConnectionError:
        raise NotAuthenticated("idempotency_oidc_keys: the keys could not be fetched") from None
    except jwt.ExpiredSignatureError:
        raise NotAuthenticated("the ID token has expired") from None
    except jwt.PyJWTError as error:
        raise _no_id_token(error) from None
    claims = believed["payload"]
    if f"{believed['header'].get('typ') or 'JWT'}".upper() != "JWT":  # such as at+jwt, RFC 9068
        raise NotAuthenticated("an access token, or another one, is no ID token: typ")
    is_for_several = isinstance(claims["aud"], list) and len(claims["aud"]) > 1
    if (is_for_several or claims.get("azp") is not None) and claims.get("azp") != settings.oidc_audience:
        raise NotAuthenticated("the ID token was made for another client: azp")
    name, groups = claims["sub"], claims.get(settings.oidc_groups, [])
    if not is_name(name):
        raise NotAuthenticated(f"sub: {NAME}")
    for group, role in GROUPS.items():
        if group in _listed(groups):
            return Identity(name, role, _tenants(settings, claims), float(claims["exp"]) + LEEWAY)
    raise NotAuthenticated(
        f"{name!r} is in none of the groups {', '.join(GROUPS)}, by the claim {settings.oidc_groups}"
    )


def _listed(claim: Any) -> list[Any]:
    """What a claim says: one text, or a list."""
    return [claim] if isinstance(claim, str) else claim if isinstance(claim, list) else []


def _tenants(settings: Settings, claims: Mapping[str, Any]) -> frozenset[str] | None:
    """The tenants of a person. Where a claim has them, a person without it has none."""
    if settings.oidc_tenants is None:
        return None
    named = _listed(claims.get(settings.oidc_tenants))
    return None if ALL_TENANTS in named else frozenset(each for each in named if isinstance(each, str))


def _named_key(token: str) -> str | None:
    """The name of the key with which a token says that it is signed. Raises `NotAuthenticated` if it is no token."""
    with extra("oidc"):
        import jwt
    if len(token) > TOKEN_LIMIT or not token.isascii():
        raise NotAuthenticated(f"an ID token has at most {TOKEN_LIMIT} characters, all of ASCII")
    try:
        named: str | None = jwt.get_unverified_header(token).get("kid")
    except jwt.PyJWTError as error:
        raise _no_id_token(error) from None
    return named


def _no_id_token(error: Exception) -> NotAuthenticated:
    """Without its text, which has parts of the token."""
    return NotAuthenticated(f"not an ID token of the issuer for this audience: {type(error).__name__}")


def _is_address(source: str) -> bool:
    return source.startswith(("https://", "http://"))


def _key(settings: Settings, named: str | None) -> Any:
    """The issuer's key of this name, which a token names; one that names none is signed with its only key. Raises PyJWT's errors."""
    import jwt

    source = settings.oidc_keys or ""
    if _is_address(source):
        issuer = _issuer(source, os.getpid())
        if named is None:
            return _only(issuer.all())
        return _found(issuer.named(named))
    try:
        keys = jwt.PyJWKSet.from_json(_read_protected(Path(source), "idempotency_oidc_keys"))
    except (ValueError, jwt.PyJWKSetError):
        raise SettingsError("idempotency_oidc_keys: is not a set of keys (JWKS)") from None
    if named is None:
        return _only(signing(keys.keys))
    return _found(by_name(signing(keys.keys), named))


def _found(key: Any) -> Any:
    """The key that was named. Raises `InvalidKeyError` if there is none."""
    import jwt

    if key is None:
        raise jwt.InvalidKeyError
    return key


def _only(keys: Sequence[Any]) -> Any:
    """The only key there is (OpenID Connect Core, 10.1). Raises `InvalidKeyError` if there are several."""
    import jwt

    if len(keys) != 1:
        raise jwt.InvalidKeyError
    return keys[0]


@lru_cache
def _issuer(address: str, _pid: int) -> IssuerKeys:
    """Those of this process: a lock of its parent may be held by a thread that is not there after a fork."""
    return IssuerKeys(address)


def _is_replaceable(path: Path, owner: int) -> bool:
    """Whether another user may put a file of theirs at this path, by a directory on the way to it or to where a link leads."""
    trusted = {0, os.geteuid()}
    place, left, is_sticky = Path("/"), [*reversed(path.absolute().parts[1:])], False
    while True:
        status = place.lstat()
        # in a directory where all may make files, the owner of one might be whoever came first
        if status.st_uid not in (trusted if is_sticky else {*trusted, owner}):
            return True
        if stat.S_ISLNK(status.st_mode):
            left += reversed(place.readlink().parts)
            place = place.parent
        elif stat.S_ISDIR(status.st_mode):
            is_sticky = bool(status.st_mode & OTHERS)
            if is_sticky and not status.st_mode & stat.S_ISVTX:
                return True
        if not left:
            return False
        name = left.pop()
        if name == "..":
            place, is_sticky = place.parent, False
        else:
            place /= name  # "/", where a link leads to an absolute path


def _read_protected(path: Path, field: str) -> str:
    """Read a file that only its owner may change or replace. Raises `SettingsError`."""
    try:
        with path.open(encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            if status.st_mode & OTHERS:
                raise SettingsError(f"{field}: others than its owner may write to it: chmod go-w")
            if _is_replaceable(path, status.st_uid):
                raise SettingsError(
                    f"{field}: others than its owner may replace it: each directory that leads to it, or to a link on the way, has to be "
                    "of the owner, of this user or of root; chmod go-w"
                )
            return file.read()
    except OSError as error:
        raise SettingsError(f"{field}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{field}: is not UTF-8") from None
