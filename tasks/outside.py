"""The configured payment provider, mail server and carrier."""

from __future__ import annotations

import logging

import celeryconfig

from .carrier import Carrier
from .gateway import Gateway, StripeGateway
from .mail import Mailer, MailServer

# The SDK logs every URL, and those contain charge ids.
logging.getLogger("stripe").setLevel(logging.WARNING)


def _gateway() -> Gateway:
    settings = celeryconfig.environment
    return StripeGateway(
        settings.stripe_api_key.get_secret_value(),
        url=settings.stripe_api_base,
        connect_timeout=settings.stripe_timeout,
        read_timeout=settings.stripe_timeout,
        search_lag=settings.stripe_search_lag,
        first_poll=settings.stripe_first_poll,
    )


def _mailer() -> Mailer:
    settings = celeryconfig.environment
    return Mailer(MailServer.at(settings.smtp_url.get_secret_value()), sender=settings.mail_from)


# All can be shared: they open connections on first use, per process or per thread.
gateway = _gateway()
mailer = _mailer()
carrier = Carrier(celeryconfig.environment.carrier_url, timeout=celeryconfig.environment.carrier_timeout)
