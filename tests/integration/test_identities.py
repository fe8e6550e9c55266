"""Two people: who they are is said by their company or by a file's owner, and not by one who approves."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import jwt
import pytest
from celery import Celery
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm
from sqlalchemy import Connection, text

from idempotency import identities
from idempotency.application import runtime_of
from idempotency.checks.people import check_people
from idempotency.errors import DiscardRefused, NotAllowed, NotAuthenticated, SettingsError
from idempotency.operate import discard
from idempotency.operate.change import REASON_LIMIT
from idempotency.operate.people import Person, authenticate
from idempotency.settings import Settings
from tests.support import bank as b
from tests.support import operations as op
from tests.support.commands import Run, runner
from tests.support.deliveries import Deliveries
from tests.support.operators import act

ISSUER, AUDIENCE = "https://login.example", "operations"
ANN, BEN = "ann's token", "ben's token"
PEOPLE = f"""
[ann]
role = "admin"
token_sha256 = "{identities.token_hash(ANN)}"

[ben]
role = "operator"
token_sha256 = "{identities.token_hash(BEN)}"
until = 2100-01-01
"""


@pytest.fixture
def run(bank: Celery, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """A command, with a person's token in the environment."""
    command: Run = runner(monkeypatch, capsys)

    def with_token(*arguments: object, token: str | None = None) -> Any:
        monkeypatch.delenv("IDEMPOTENCY_TOKEN", raising=False)
        if token is not None:
            monkeypatch.setenv("IDEMPOTENCY_TOKEN", token)
        return command(*arguments)

    return with_token


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "people.toml"
    path.write_text(PEOPLE)
    path.chmod(0o644)
    return path


@pytest.fixture
def letter(bank: Celery, connection: Connection) -> int:
    Deliveries(bank).deliver(b.failing, "a1", "permanent")
    (found,) = op.dead_letters(connection)
    return int(found.id)


# ---------------------------------------------------------------- the attack


def test_an_admin_cannot_mint_a_second_identity_and_approve_with_it(
    run: Callable[..., Any], configure: Callable[..., None], file: Path, connection: Connection, letter: int
) -> None:
    """Reproduced by a review, where people are known by the database."""
    ann = run("operators", "add", "ann", "--role", "admin", "--json").document["token"]
    refused = run("operators", "add", "anna", "--role", "admin", token=ann)
    assert (refused.status, "an admin does not" in refused.error) == (1, True)
    second = run("operators", "add", "anna", "--role", "admin", "--as-owner", "--json").document["token"]
    configure(people_file=str(file))
    assert run("dead-letters", "discard", letter, "--reason", "mine", token=ANN).status == 0
    for token in (second, ann, None):
        refused = run("dead-letters", "approve", letter, token=token)
        assert (refused.status, "IDEMPOTENCY_TOKEN: n" in refused.error) == (1, True)
    for minting in (["add", "anna2", "--role", "admin"], ["add", "anna2", "--as-owner"], ["remove", "ann"]):
        refused = run("operators", *minting, token=ANN)
        assert (refused.status, "people are known by idempotency_people_file" in refused.error) == (1, True)
    assert "needs the role approver, 'ben' is operator" in run("dead-letters", "approve", letter, token=BEN).error
    assert "'ann' asked for it, so another person" in run("dead-letters", "approve", letter, token=ANN).error
    assert [each.status for each in op.dead_letters(connection)] == ["open"]
    noted = connection.execute(text("SELECT actor FROM idempotency.audit WHERE action = 'refused' ORDER BY id"))
    assert noted.scalars().all()[-1] == "ben"


# ---------------------------------------------------------------- a file


def test_a_person_of_the_file_is_known_by_a_token_of_their_own(
    run: Callable[..., Any], configure: Callable[..., None], bank: Celery, file: Path
) -> None:
    made = run("operators", "token", "--json").document
    file.write_text(f'{PEOPLE}\n[eve]\nrole = "admin"\ntoken_sha256 = "{made["token_sha256"]}"\nuntil = 2020-01-01\n')
    configure(people_file=str(file))
    runtime = runtime_of(bank)
    assert authenticate(runtime, ANN, role="admin", action="approve") == Person("ann", "admin", "file")
    with pytest.raises(NotAuthenticated, match="the token of 'eve' has expired"):
        authenticate(runtime, made["token"], role="operator", action="approve")
    listed = run("operators", "list", "--json").document
    assert [(each["name"], each["expired"]) for each in listed] == [("ann", False), ("ben", False), ("eve", True)]
    (found,) = check_people(runtime.settings)
    assert (found.level, found.found) == ("ok", "3 are known by idempotency_people_file")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda path: path.chmod(0o664), "others than its owner may write to it: chmod go-w"),
        (lambda path: path.chmod(0o646), "others than its owner may write to it: chmod go-w"),
        (lambda path: path.parent.chmod(0o777), "others than its owner may replace it"),
        (lambda path: path.unlink(), "No such file or directory"),
        (lambda path: path.write_text("[ann"), "is not TOML"),
        (lambda path: path.write_bytes(b"\xff"), "is not UTF-8"),
        (
            lambda path: path.write_text("[ann]\nrole = 'owner'"),
            "ann.role: Input should be 'reader', 'operator', 'approver' or 'admin'",
        ),
        (lambda path: path.write_text(PEOPLE.replace(identities.token_hash(BEN), identities.token_hash(ANN))), "same"),
        (lambda path: path.write_text(PEOPLE.replace("[ben]", "[Ann]")), "two names differ only in case"),
        (lambda path: path.write_text(PEOPLE.replace("[ben]", '["an\u034fn"]')), "two names differ only in case"),
        (
            lambda path: path.write_text(PEOPLE.replace("[ben]", '["ann\\u200b"]')),
            "a name has 1 to 255 printable characters",
        ),
        (lambda path: path.write_text(PEOPLE.replace(identities.token_hash(BEN), ANN)), "ben.token_sha256: String"),
    ],
)
def test_a_file_that_others_may_change_or_that_is_malformed_is_refused(
    file: Path, change: Callable[[Path], object], why: str
) -> None:
    change(file)
    with pytest.raises(SettingsError, match=f"^idempotency_people_file: .*{why}") as refused:
        identities.known_people(file)
    assert ANN not in str(refused.value)
    settings = Settings(database_url="postgresql+psycopg://h/d", people_file=file)
    (found,) = check_people(settings)
    assert (found.level, found.subject) == ("warning", "idempotency_people_file")


def test_a_file_that_others_may_replace_on_the_way_to_it_is_refused(file: Path, tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    own.mkdir()
    (shared / "below").mkdir(mode=0o755)
    (shared / "below" / "people.toml").write_text(PEOPLE)
    (shared / "link.toml").symlink_to(file)
    (own / "to-link.toml").symlink_to("../shared/link.toml")
    (own / "below").symlink_to(shared / "below")
    (own / "link.toml").symlink_to("../people.toml")
    refused = [
        shared / "below" / "people.toml",
        shared / "link.toml",
        own / "to-link.toml",
        own / "below" / "people.toml",
    ]
    for mode in (0o777, 0o775):
        shared.chmod(mode)
        for path in refused:
            with pytest.raises(SettingsError, match="others than its owner may replace it"):
                identities.known_people(path)
        assert set(identities.known_people(own / "link.toml")) == {"ann", "ben"}
    for mode in (0o1777, 0o755):
        shared.chmod(mode)
        for path in refused:
            assert set(identities.known_people(path)) == {"ann", "ben"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_is_its_owners_and_in_a_shared_directory_this_users(file: Path, tmp_path: Path) -> None:
    os.chown(file, 12345, 12345)
    assert set(identities.known_people(file)) == {"ann", "ben"}
    for sticky, another in ((0o1777, 0), (0o755, 54321)):
        tmp_path.chmod(sticky)
        os.chown(tmp_path, another, 0)
        with pytest.raises(SettingsError, match="others than its owner may replace it"):
            identities.known_people(file)


def test_a_person_of_the_file_may_only_look_or_have_some_tenants(
    configure: Callable[..., None], bank: Celery, file: Path, connection: Connection
) -> None:
    tokens = {"rita": "reader", "tina": "operator", "tom": "approver"}
    more = "".join(
        f'[{name}]\nrole = "{role}"\ntoken_sha256 = "{identities.token_hash(name)}"\ntenants = ["acme"]\n'
        for name, role in tokens.items()
    )
    file.write_text(PEOPLE + more)
    configure(people_file=str(file))
    runtime = runtime_of(bank)
    with pytest.raises(NotAllowed, match="discard: needs the role operator, 'rita' is reader"):
        authenticate(runtime, "rita", role="operator", action="discard")
    for tenant in ("acme", "globex"):
        Deliveries(bank).deliver(b.failing, "t1", "permanent", tenant=tenant)
    letters = {row.tenant: row.id for row in op.dead_letters(connection)}
    tina = authenticate(runtime, "tina", role="operator", action="discard")
    tom = authenticate(runtime, "tom", role="approver", action="approve")
    with pytest.raises(NotAllowed, match="'tina' may not change operations of this tenant"):
        act(bank, discard.request, tina, letters["globex"], "mine")
    act(bank, discard.request, tina, letters["acme"], "mine")
    act(bank, discard.approve, tom, letters["acme"])
    act(bank, discard.request, authenticate(runtime, ANN, role="operator", action="discard"), letters["globex"], "x")
    with pytest.raises(NotAllowed, match="'tom' may not change"):
        act(bank, discard.approve, tom, letters["globex"])
    assert {row.tenant: row.status for row in op.dead_letters(connection)} == {"acme": "discarded", "globex": "open"}


# ---------------------------------------------------------------- the company


RSA_KEY, OTHER_KEY = (rsa.generate_private_key(public_exponent=65537, key_size=2048) for _ in range(2))
EC_KEY = ec.generate_private_key(ec.SECP256R1())
KEYS = json.dumps(
    {
        "keys": [
            json.loads(RSAAlgorithm.to_jwk(RSA_KEY.public_key())) | {"kid": "1", "use": "sig", "alg": "RS256"},
            json.loads(ECAlgorithm.to_jwk(EC_KEY.public_key())) | {"kid": "2", "use": "sig"},
            json.loads(RSAAlgorithm.to_jwk(OTHER_KEY.public_key())) | {"kid": "3", "use": "enc"},
        ]
    }
)


def id_token(
    key: Any = RSA_KEY, algorithm: str = "RS256", kid: str | None = "1", typ: str | None = "JWT", **claims: Any
) -> str:
    now = time.time()
    payload = {"iss": ISSUER, "aud": AUDIENCE, "sub": "ann", "iat": now, "exp": now + 60} | claims
    payload = {name: value for name, value in payload.items() if value is not None}
    return jwt.encode(payload, key, algorithm, headers={"typ": typ} | ({} if kid is None else {"kid": kid}))


@pytest.fixture
def company(bank: Celery, configure: Callable[..., None], tmp_path: Path) -> Any:
    keys = tmp_path / "keys.json"
    keys.write_text(KEYS)
    configure(oidc_issuer=ISSUER, oidc_audience=AUDIENCE, oidc_keys=str(keys))
    return runtime_of(bank)


ADMIN: dict[str, Any] = {"groups": ["staff", "idempotency-admin"]}


def test_an_id_token_of_the_company_says_who_somebody_is(company: Any) -> None:
    admin = authenticate(company, id_token(**ADMIN), role="admin", action="approve")
    assert admin == Person("ann", "admin", ISSUER)
    ben = id_token(EC_KEY, "ES256", "2", sub="ben", groups="idempotency-operator", aud=[AUDIENCE])
    assert authenticate(company, ben, role="operator", action="discard") == Person("ben", "operator", ISSUER)
    with pytest.raises(NotAllowed, match="needs the role admin"):
        authenticate(company, ben, role="admin", action="approve")
    for typ in (None, "jwt"):
        assert authenticate(company, id_token(**ADMIN, typ=typ, azp=AUDIENCE), role="admin", action="approve") == admin
    for_several = id_token(**ADMIN, aud=[AUDIENCE, "other"], azp=AUDIENCE)
    assert authenticate(company, for_several, role="admin", action="approve").role == "admin"


WRONG: dict[str, Any] = {
    "another issuer": (lambda: id_token(**ADMIN, iss="https://evil.example"), "InvalidIssuerError"),
    "another audience": (lambda: id_token(**ADMIN, aud="shop"), "InvalidAudienceError"),
    "no audience": (lambda: id_token(**ADMIN, aud=None), "MissingRequiredClaimError"),
    "another client": (lambda: id_token(**ADMIN, aud=[AUDIENCE, "shop"], azp="shop"), "another client"),
    "another client's for this audience": (lambda: id_token(**ADMIN, azp="shop"), "another client"),
    "the same in a list": (lambda: id_token(**ADMIN, aud=[AUDIENCE], azp="shop"), "another client"),
    "for several, by no client": (lambda: id_token(**ADMIN, aud=[AUDIENCE, "shop"]), "another client"),
    "an access token": (lambda: id_token(**ADMIN, typ="at+jwt", client_id="cron"), "is no ID token: typ"),
    "expired": (lambda: id_token(**ADMIN, exp=time.time() - 60), "has expired"),
    "without end": (lambda: id_token(**ADMIN, exp=None), "MissingRequiredClaimError"),
    "of the future": (lambda: id_token(**ADMIN, iat=time.time() + 600), "ImmatureSignatureError"),
    "nobody": (lambda: id_token(**ADMIN, sub=None), "MissingRequiredClaimError"),
    "a name that is none": (lambda: id_token(**ADMIN, sub=" "), "sub: 1 to 255"),
    "a name that is not shown": (lambda: id_token(**ADMIN, sub="\u3164"), "sub: 1 to 255"),
    "no group": (lambda: id_token(groups=["staff"]), "is in none of the groups"),
    "a key that is not the company's": (lambda: id_token(OTHER_KEY, **ADMIN), "InvalidSignatureError"),
    "a key for other things": (lambda: id_token(OTHER_KEY, kid="3", **ADMIN), "InvalidKeyError"),
    "an unknown key": (lambda: id_token(kid="9", **ADMIN), "InvalidKeyError"),
    "unsigned": (lambda: id_token(None, "none", **ADMIN), "InvalidAlgorithmError"),
    "signed with what is shared": (lambda: id_token(b"s" * 32, "HS256", **ADMIN), "InvalidAlgorithmError"),
    "no token": (lambda: "ik_a_b", "DecodeError"),
    "too long": (lambda: "x" * 20_000, "at most 16384 characters"),
    "not UTF-8": (lambda: "x.\udcff.y", "all of ASCII"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_no_other_token_is_believed_and_none_is_repeated(company: Any, connection: Connection, wrong: str) -> None:
    make, why = WRONG[wrong]
    token = make()
    with pytest.raises(NotAuthenticated, match=f"^IDEMPOTENCY_TOKEN: .*{why}") as refused:
        authenticate(company, token, role="operator", action="discard")
    noted = connection.execute(text("SELECT reason FROM idempotency.audit WHERE action = 'refused'")).scalar_one()
    assert noted == str(refused.value)
    assert token not in noted


def test_a_refusal_of_any_length_is_audited(company: Any, connection: Connection) -> None:
    """255 printable characters, of which the repr is longer than a reason may be."""
    with pytest.raises(NotAuthenticated, match="is in none of the groups"):
        authenticate(company, id_token(sub="\\" * 255, groups=[]), role="operator", action="GET /\0")
    noted = connection.execute(text("SELECT reason FROM idempotency.audit WHERE action = 'refused'")).scalar_one()
    assert noted.startswith("IDEMPOTENCY_TOKEN: ")
    assert len(noted) == REASON_LIMIT


def test_a_token_that_names_no_key_is_signed_with_the_only_one(company: Any) -> None:
    """OpenID Connect Core, 10.1: with several, it has to name its key."""
    nameless = id_token(**ADMIN, kid=None)
    with pytest.raises(NotAuthenticated, match="InvalidKeyError"):
        authenticate(company, nameless, role="admin", action="approve")
    keys = json.loads(KEYS)["keys"]
    Path(company.settings.oidc_keys).write_text(json.dumps({"keys": [keys[0], keys[2]]}))
    assert authenticate(company, nameless, role="admin", action="approve").name == "ann"
    with pytest.raises(NotAuthenticated, match="InvalidSignatureError"):
        authenticate(company, id_token(OTHER_KEY, **ADMIN, kid=None), role="admin", action="approve")


def test_a_person_has_the_tenants_of_the_claim_that_is_named(
    company: Any, configure: Callable[..., None], bank: Celery
) -> None:
    configure(oidc_tenants="tenants")
    runtime = runtime_of(bank)
    for claim, tenants in (
        (["acme"], {"acme"}),
        ("acme", {"acme"}),
        (["*", "acme"], None),
        (None, set()),
        ([7], set()),
    ):
        person = authenticate(runtime, id_token(**ADMIN, tenants=claim), role="admin", action="approve")
        assert person.tenants == (None if tenants is None else frozenset(tenants))


def test_keys_that_others_may_write_are_not_believed(company: Any) -> None:
    Path(company.settings.oidc_keys).chmod(0o666)
    with pytest.raises(SettingsError, match="idempotency_oidc_keys: others than its owner may write"):
        authenticate(company, id_token(**ADMIN), role="admin", action="approve")


def test_one_person_of_the_company_cannot_ask_and_approve(company: Any, bank: Celery, letter: int) -> None:
    """By whatever address or name the company shows them: `sub` stays the same."""
    asks = authenticate(company, id_token(**ADMIN, email="ann@a"), role="operator", action="discard")
    act(bank, discard.request, asks, letter, "mine")
    approves = authenticate(company, id_token(**ADMIN, email="anna@a", name="Anna"), role="admin", action="approve")
    with pytest.raises(DiscardRefused, match="'ann' asked for it"):
        act(bank, discard.approve, approves, letter)
    another = authenticate(company, id_token(**ADMIN, sub="ben"), role="admin", action="approve")
    act(bank, discard.approve, another, letter)


class Provider(BaseHTTPRequestHandler):
    answer = (200, KEYS)

    def do_GET(self) -> None:
        status, body = self.answer
        self.send_response(status)
        self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        """Tests print nothing."""


@pytest.mark.parametrize("answer", [(200, KEYS), (503, KEYS), (302, ""), (200, "no JSON")])
def test_the_keys_may_be_fetched_from_the_issuer(
    bank: Celery, configure: Callable[..., None], monkeypatch: pytest.MonkeyPatch, answer: tuple[int, str]
) -> None:
    monkeypatch.setattr(Provider, "answer", answer)
    identities._issuer.cache_clear()
    server = HTTPServer(("127.0.0.1", 0), Provider)
    serving = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    try:
        address = f"http://127.0.0.1:{server.server_port}/keys"
        configure(oidc_issuer=ISSUER, oidc_audience=AUDIENCE, oidc_keys=address)
        if answer == (200, KEYS):
            assert authenticate(runtime_of(bank), id_token(**ADMIN), role="admin", action="x").name == "ann"
        else:
            with pytest.raises(NotAuthenticated, match="idempotency_oidc_keys: the keys could not be fetched"):
                authenticate(runtime_of(bank), id_token(**ADMIN), role="admin", action="x")
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"oidc_issuer": ISSUER}, "oidc_issuer, oidc_audience and oidc_keys: all of them or none"),
        ({"oidc_keys": "http://login.example/keys"}, "idempotency_oidc_keys: must begin with https://"),
        ({"oidc_keys": "keys.json"}, "idempotency_oidc_keys: must be an https address, or the absolute path"),
        (
            {"oidc_issuer": ISSUER, "oidc_audience": AUDIENCE, "oidc_keys": "/keys", "people_file": "/people"},
            "people_file and oidc_issuer: one of them",
        ),
        ({"web_url": "https://ops.example"}, "web_url and web_secret: both or neither"),
        ({"web_url": "https://ops.example", "web_secret": "s" * 32}, "with oidc_issuer, by which people log in"),
        ({"web_url": "http://ops.example", "web_secret": "s" * 32}, "idempotency_web_url: must begin with https://"),
        ({"web_url": "https://ops.example", "web_secret": "short"}, "idempotency_web_secret: "),
        ({"web_effect_link": "https://a.example/{key.__class__}"}, "idempotency_web_effect_link: must have no names"),
        ({"web_effect_link": "javascript:alert({key})"}, "idempotency_web_effect_link: must be an address"),
        ({"code_version": "v1 -c x=y"}, "idempotency_code_version: "),
    ],
)
def test_settings_that_would_believe_anybody_are_refused(given: dict[str, str], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        Settings.read({"database_url": "postgresql+psycopg://h/d"} | given)
