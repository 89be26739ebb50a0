"""schemathesis against the gateway's own OpenAPI document: whatever is sent, the answer is no defect."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error

from clew.gateway.agent_session import Limits
from clew.gateway.app import application
from clew.gateway.episode_keys import EpisodeSessions
from clew.gateway.gateway_thread import GatewayThread
from tests.gateway.chatml import chatml_tokenizer
from tests.gateway.spoken import Spoken, session_on

EXAMPLES = 12
DOCUMENT = application(EpisodeSessions()).openapi()
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
ROUTES = [
    pytest.param(path, method.upper(), mode, id=f"{path} {mode.value}")
    for path, methods in DOCUMENT["paths"].items()
    for method in methods
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    if (method, mode) != ("get", GenerationMode.NEGATIVE)  # nothing to get wrong
]


class Reached:
    """A gateway and an episode, after which comes another when a client has ended it."""

    def __init__(self, engine: Spoken) -> None:
        self._gateway = GatewayThread(Limits())
        self._engine = engine
        self._client = requests.Session()
        self._key, self._session = self._gateway.open(session_on(engine))

    def send(self, case: Case) -> int:
        """The status of the answer, which is checked."""
        if self._session.ended is not None:
            self._key, self._session = self._gateway.open(session_on(self._engine))
        root = self._gateway.base_url.removesuffix("/v1")
        response = case.call(base_url=root, session=self._client, headers={"Authorization": f"Bearer {self._key}"})
        case.validate_response(response, checks=[not_a_server_error])
        if response.headers["content-type"][0].startswith("text/event-stream"):
            assert "server_error" not in response.text and "api_error" not in response.text
        else:
            assert isinstance(response.json(), dict)
        return response.status_code

    def close(self) -> None:
        self._client.close()
        self._gateway.stop()


@pytest.fixture(scope="module")
def reached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reached]:
    tokenizer = chatml_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    made = Reached(Spoken(tokenizer, lambda prompt: "the answer is right<|im_end|>"))
    yield made
    made.close()


@pytest.mark.parametrize(("path", "method", "mode"), ROUTES)
def test_nothing_that_is_sent_brings_out_a_defect(
    reached: Reached, path: str, method: str, mode: GenerationMode
) -> None:
    statuses: set[int] = set()

    @given(case=SCHEMA[path][method].as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    def send(case: Case) -> None:
        statuses.add(reached.send(case))

    send()
    if mode is GenerationMode.POSITIVE and path != "/rl/start_session":  # in training nobody starts a session
        assert 200 in statuses
