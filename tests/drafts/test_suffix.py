from quire.drafts import suffix
from quire.drafts.suffix import SuffixProposer
from quire.drafts.token_index import LONGEST_MATCH
from quire.sampling_params import SamplingParams
from quire.scheduler.request import Request
from quire.types import Draft, RequestSpec, RequestStatus

TEXT = list(range(100, 160))


def request(prompt: list[int], name: str = "r", salt: str = "") -> Request:
    return Request(RequestSpec(name, prompt, SamplingParams(temperature=0), max_tokens=500, hash_extras=(salt,)))


def say(item: Request, token_ids: list[int]) -> None:
    item.output_token_ids += token_ids


def end(proposer: SuffixProposer, item: Request) -> None:
    item.status = RequestStatus.FINISHED_STOPPED
    proposer.forget_finished()


def test_repeated_text_is_proposed_as_it_went_on() -> None:
    proposer, item = SuffixProposer(), request([*TEXT, 5, *TEXT[:3]])
    draft = proposer.propose(item, 4)
    assert draft.token_ids == tuple(TEXT[3:7])
    say(item, TEXT[3:9])
    longer = proposer.propose(item, 4)
    assert longer.token_ids == tuple(TEXT[9:13])
    assert longer.probabilities[0] > draft.probabilities[0], "a longer match is right more often"


def test_new_text_gets_no_draft() -> None:
    proposer, item = SuffixProposer(), request(TEXT)
    for token_id in range(1000, 1050):
        assert proposer.propose(item, 8) == Draft()
        say(item, [token_id])


def test_text_goes_on_behind_a_replaced_word() -> None:
    proposer, item = SuffixProposer(), request([*TEXT, 5, *TEXT[:6]])
    assert proposer.propose(item, 3).token_ids == tuple(TEXT[6:9])
    say(item, [77])  # instead of TEXT[6]
    assert proposer.propose(item, 3) == Draft()
    say(item, [TEXT[7]])  # of two known tokens no longer match exists
    assert proposer.propose(item, 3).token_ids == tuple(TEXT[8:11])


def test_estimates_follow_what_came_instead_of_proposals_that_nobody_verified() -> None:
    shares = []
    for is_right in (True, False):
        proposer = SuffixProposer()
        for number in range(30):
            item = request([*TEXT, 5, *TEXT[:4]], f"r{number}")
            proposer.propose(item, 1)
            say(item, [TEXT[4] if is_right else 9])
            proposer.propose(item, 1)
        shares.append(proposer.propose(request([*TEXT, 5, *TEXT[:4]], "new"), 1).probabilities[0])
    assert shares[0] > 0.8
    assert shares[1] < 0.2


def test_first_tokens_that_are_often_wrong_leave_trust_in_those_behind_a_right_one() -> None:
    proposer, shares = SuffixProposer(), ()
    for number in range(60):
        item = request([*TEXT, 5, *TEXT[:3]], f"r{number}")
        shares = proposer.propose(item, 3).probabilities
        say(item, TEXT[3:6] if number % 3 == 0 else [9])
        proposer.propose(item, 3)
    assert shares[0] < 0.5
    assert min(shares[1:]) > 0.8


def test_finished_answer_is_proposed_to_requests_with_its_salt_only() -> None:
    proposer, first = SuffixProposer(), request([1, 2], "first", "a")
    proposer.propose(first, 4)
    say(first, TEXT)
    end(proposer, first)
    assert not proposer._followers
    same, other = request([50, *TEXT[:5]], "same", "a"), request([50, *TEXT[:5]], "other", "b")
    assert proposer.propose(same, 4).token_ids == tuple(TEXT[5:9])
    assert proposer.propose(other, 4) == Draft()


def test_request_with_a_name_used_again_starts_anew() -> None:
    proposer = SuffixProposer()
    proposer.propose(request([*TEXT, *TEXT[:3]]), 4)
    assert proposer.propose(request([1, 2, 3, 4]), 4) == Draft()


def test_finished_answers_are_bounded_and_the_oldest_go(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(suffix, "MAX_FINISHED_TOKENS", 400)
    monkeypatch.setattr(suffix, "MAX_SALTS", 2)
    proposer = SuffixProposer()

    def answer(start: int, salt: str) -> None:
        item = request([1], f"{salt}{start}", salt)
        proposer.propose(item, 1)
        say(item, list(range(start, start + LONGEST_MATCH + 8)))
        end(proposer, item)

    for start in range(1000, 9000, 100):
        answer(start, "a")
    kept = sum(len(index.tokens) for index in proposer._finished["a",])
    assert 200 <= kept <= 400
    assert proposer.propose(request([8900, 8901, 8902], "new", "a"), 2).token_ids == (8903, 8904)
    assert proposer.propose(request([1000, 1001, 1002], "old", "a"), 2) == Draft()
    answer(10, "b")
    answer(10, "c")
    assert len(proposer._finished) == 2
