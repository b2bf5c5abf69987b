"""Requests made from what `/openapi.json` says: none makes the server fail, and answers are as they are described."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from kvboost_hf.assets import load_embedded
from tests.internals.server import make_app
from tests.server.conftest import SETTINGS
from tests.server.fake_engine import FakeEngine

schemathesis = pytest.importorskip("schemathesis")
conformance = pytest.importorskip("schemathesis.specs.openapi.checks").response_schema_conformance


class _Lasting(FakeEngine):
    """Goes on when the app ends: each request starts the app anew."""

    def drain(self, timeout_s: float) -> bool:
        return True


_APP = make_app(_Lasting("Anna ", "plays."), load_embedded()[1], replace(SETTINGS, allowed_hosts=("*",)))
# The route that is left out says 404, whatever is sent.
_DESCRIBED = schemathesis.openapi.from_asgi("/openapi.json", _APP).exclude(path="/v1/embeddings")


@_DESCRIBED.parametrize()
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_request_makes_the_server_fail(case: Any) -> None:
    case.call_and_validate(checks=[schemathesis.checks.not_a_server_error, conformance])
