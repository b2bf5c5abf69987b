"""Requests made from what `/openapi.json` says: none makes the server fail, and answers are as they are described."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from kvboost_hf.assets import load_embedded
from tests.internals.server import make_app
from tests.server.conftest import SETTINGS
from tests.server.fake_engine import FakeEngine

_PARTS = 6  # of the routes, so that several processes share them
_SETTINGS = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


class _Lasting(FakeEngine):
    """Goes on when the app ends: each request starts the app anew."""

    def drain(self, timeout_s: float) -> bool:
        return True


@pytest.fixture(scope="module")
def described() -> Any:
    """What an app says of itself. (The plugin of schemathesis would make requests in each process that collects.)"""
    schemathesis = pytest.importorskip("schemathesis")
    app = make_app(_Lasting("Anna ", "plays."), load_embedded()[1], replace(SETTINGS, allowed_hosts=("*",)))
    # The route that is left out says 404, whatever is sent.
    return schemathesis.openapi.from_asgi("/openapi.json", app).exclude(path="/v1/embeddings")


@pytest.mark.parametrize("part", range(_PARTS))
def test_no_request_makes_the_server_fail(described: Any, part: int) -> None:
    from schemathesis.checks import not_a_server_error
    from schemathesis.generation.hypothesis.builder import HypothesisTestConfig, HypothesisTestMode, create_test
    from schemathesis.specs.openapi.checks import response_schema_conformance

    def check(case: Any) -> None:
        case.call_and_validate(checks=[not_a_server_error, response_schema_conformance])

    config = HypothesisTestConfig(project=described.config, modes=list(HypothesisTestMode), settings=_SETTINGS)
    operations = [result.ok() for result in described.get_all_operations()]
    assert len(operations) > _PARTS
    for operation in operations[part::_PARTS]:
        create_test(operation=operation, test_func=check, config=config)()
