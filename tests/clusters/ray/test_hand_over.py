"""Ray's own client of job submission: where it asks, and what becomes of a job whose answer does not come."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests import ctrl_c
from tests.clusters.ray.ray_lab import why_not
from tests.clusters.ray.scripted_dashboard import Dashboard, dashboard

from paceline.core.errors import UnavailableError, UsageError
from paceline.engines.ray import job_submission
from paceline.engines.ray.ray_engine import Ray

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.leaky("what an import of Ray starts"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

SUBMIT, STOP, RUN = "POST /api/jobs/", "POST /api/jobs/ID/stop", {"entrypoint": "true"}
TAKEN = (200, '{"job_id": null, "submission_id": "as it was asked"}')
STOPPED, UNKNOWN = (200, '{"stopped": true}'), (404, "Job ID does not exist")


@pytest.fixture
def head() -> Iterator[Dashboard]:
    with dashboard() as made:
        yield made


@pytest.mark.parametrize("name", ["RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"])
def test_a_given_dashboard_precedes_the_environment(
    name: str, head: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:1")
    job_submission.check(Ray(dashboard=head.url))


def test_a_job_that_is_taken_is_asked_for_once(head: Dashboard) -> None:
    head.answers[SUBMIT] = TAKEN
    assert job_submission.submit(Ray(dashboard=head.url), RUN) == "as it was asked"
    assert head.asked == [SUBMIT]


@pytest.mark.parametrize("answer", [(0, ""), (500, "no agent"), (504, "too slow"), (200, "<html>")])
@pytest.mark.parametrize(
    ("stop", "known"),
    [
        (STOPPED, "was taken all the same, and is stopped"),
        ((200, '{"stopped": false}'), "whether it was taken is not known; `ray job stop --address"),
        ((504, "too slow"), "whether it was taken is not known; `ray job stop --address"),
        ((0, ""), "whether it was taken is not known; `ray job stop --address"),
        (UNKNOWN, "Ray does not know it now; `ray job stop --address"),
    ],
)
def test_a_job_whose_answer_does_not_come_is_stopped_and_named(
    answer: tuple[int, str], stop: tuple[int, str], known: str, head: Dashboard
) -> None:
    head.answers |= {SUBMIT: answer, STOP: stop}
    with pytest.raises(UnavailableError, match="did not say whether it takes the job") as told:
        job_submission.submit(Ray(dashboard=head.url), RUN)
    identifier = identifier_of(head)
    [note] = told.value.__notes__
    assert f"job {identifier}" in note
    assert known in note
    assert note.endswith((f"{head.url} {identifier}` ends it", "is stopped"))


@pytest.mark.parametrize(("stop", "known"), [(STOPPED, "is stopped"), ((-1, ""), "is not known")])
def test_a_job_that_is_interrupted_is_stopped_and_named(
    stop: tuple[int, str], known: str, head: Dashboard
) -> None:
    """Also where the second request is interrupted too."""
    head.answers |= {SUBMIT: (-1, ""), STOP: stop}
    with ctrl_c.heard(), pytest.raises(KeyboardInterrupt, match=known) as told:
        job_submission.submit(Ray(dashboard=head.url), RUN)
    assert identifier_of(head) in str(told.value)


def test_a_job_that_is_refused_is_not_there_to_be_stopped(head: Dashboard) -> None:
    head.answers[SUBMIT] = (400, "Traceback (most recent call last):\n  ...\nValueError: no such env\n")
    with pytest.raises(UnavailableError, match=r"refused the job: .* 400: ValueError: no such env\n"):
        job_submission.submit(Ray(dashboard=head.url), RUN)
    assert head.asked == [SUBMIT]


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (UNKNOWN, UsageError, "does not know the job 'paceline-1'"),
        ((400, "Can only stop submission type jobs"), UsageError, "refuses what is asked .* type jobs"),
        ((500, "the agent starts"), UnavailableError, "cannot be asked about .* the agent starts"),
        ((200, "<html>"), UnavailableError, "cannot be asked about the job"),
        ((0, ""), UnavailableError, "cannot be asked about the job"),
    ],
)
@pytest.mark.parametrize("question", ["status", "log", "stop"])
def test_only_an_answer_ends_the_questions_about_a_job(
    question: str, answer: tuple[int, str], kind: type[Exception], message: str, head: Dashboard
) -> None:
    """`paceline submit --wait` asks again after UnavailableError."""
    asked = {"status": "GET /api/jobs/ID", "log": "GET /api/jobs/ID/logs", "stop": STOP}[question]
    head.answers[asked] = answer
    with pytest.raises(kind, match=message):
        getattr(job_submission, question)(Ray(dashboard=head.url), "paceline-1")


def identifier_of(head: Dashboard) -> str:
    """Return the job that was stopped after it was submitted."""
    submitted, stopped = head.asked
    assert submitted == SUBMIT
    return stopped.removeprefix("POST /api/jobs/").removesuffix("/stop")
