"""The rules of the protocol hold however its actors interleave and die; wrong rules are found out."""

from dataclasses import replace

import pytest
from explorer import REQUEST, BrokenError, Explorer, PausingSlot, Rules, Setting

from coterie.experts.protocol import rules
from coterie.experts.protocol.rules import NOBODY, State, Word, state_of, state_word

SETTINGS = {
    "two clients want one slot, and one loses patience": Setting(timeouts=1, tries=1),
    "a client loses patience twice": Setting(clients=1, timeouts=2, tries=3),
    "a client may take either of two slots": Setting(slots=2, clients=1, timeouts=1),
    "one of all dies for good": Setting(deaths=1, restarts=False, tries=1),
    "a client dies and comes again": Setting(deaths=1, mortals=("client",), clients=1, timeouts=1),
    "a server dies and comes again": Setting(deaths=1, mortals=("server",), clients=1),
    "one of two servers dies": Setting(servers=2, deaths=1, mortals=("server",), clients=1, restarts=False),
    "another client writes to its slot what it likes": Setting(vandals=1, clients=1, tries=1),
    "client and sweeper die in turn": Setting(deaths=2, mortals=("client", "sweeper"), clients=1, tries=1),
}
"""Small enough for every run of the tests; `bench/expert_protocol.py` explores larger ones."""


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_whatever_happens_each_request_gets_its_reply_or_fails_and_no_slot_leaks(setting):
    assert Explorer(setting).explore() > 100


# A client that reaches its slot by NIXL can read and store, but not swap; the server withdraws and releases.


def post_by_a_store(slot, request):
    sequence = rules.sequence_of(slot.load(Word.STATE)) + 1  # which it knows from the invitation
    slot.write_request(sequence, request)
    slot.store(Word.STATE, state_word(State.READY, sequence))
    return sequence


def take_and_leave_it_done(slot, sequence):
    if slot.load(Word.STATE) != state_word(State.DONE, sequence):
        return None
    echoed, reply = slot.read_reply()
    assert echoed == sequence
    return reply


def withdraw_by_a_store(slot, sequence):
    slot.store(Word.STATE, state_word(State.FREE, sequence))


def release_by_the_server(slot, owner):
    rules.withdraw(slot, rules.sequence_of(slot.load(Word.STATE)))
    rules.release(slot, owner)


BY_NIXL = Rules(
    post=post_by_a_store, take=take_and_leave_it_done, withdraw=withdraw_by_a_store, release=release_by_the_server
)


@pytest.mark.parametrize("name", list(SETTINGS)[:4] + list(SETTINGS)[5:7])  # the others take longest
def test_the_rules_hold_where_the_owner_of_a_slot_stores_its_state_and_does_not_swap(name):
    assert Explorer(replace(SETTINGS[name], rules=BY_NIXL)).explore() > 100


# Wrong rules.


def claim_by_a_flag(slot, client):
    if not slot.swap("claimed", 0, 1):
        return False
    slot.store(Word.OWNER, client)
    return True


def release_by_a_flag(slot, owner):
    slot.store(Word.OWNER, NOBODY)
    slot.store("claimed", 0)


def sweep_by_a_flag(slot, sweeper, alive):
    if slot.load("claimed") and not alive(slot.load(Word.OWNER)):
        rules.withdraw(slot, rules.sequence_of(slot.load(Word.STATE)))
        release_by_a_flag(slot, NOBODY)


def sweep_without_a_second_look(slot, sweeper, alive):
    owner = slot.load(Word.OWNER)
    if owner != NOBODY and not alive(owner):
        slot.store(Word.OWNER, sweeper)
        rules.withdraw(slot, rules.sequence_of(slot.load(Word.STATE)))
        rules.release(slot, sweeper)


def sweep_that_gives_the_slot_away_first(slot, sweeper, alive):
    owner = slot.load(Word.OWNER)
    if owner != NOBODY and not alive(owner):
        slot.swap(Word.OWNER, owner, NOBODY)
        rules.withdraw(slot, rules.sequence_of(slot.load(Word.STATE)))


def sweep_that_leaves_the_state(slot, sweeper, alive):
    owner = slot.load(Word.OWNER)
    if owner != NOBODY and not alive(owner):
        slot.swap(Word.OWNER, owner, NOBODY)


def sweep_of_the_silent(slot, sweeper, alive):
    """A time-out taken for a death."""
    rules.sweep(slot, sweeper, lambda owner: False)


def answer_without_a_number(slot, sequence, reply):
    slot.write_reply(sequence, reply)
    word = slot.load(Word.STATE)
    if state_of(word) is State.READY:
        slot.swap(Word.STATE, word, state_word(State.DONE, rules.sequence_of(word)))


def answer_without_a_swap(slot, sequence, reply):
    slot.write_reply(sequence, reply)
    slot.store(Word.STATE, state_word(State.DONE, sequence))


def pick_up_that_knows_states_only(slot):
    State(slot.load(Word.STATE) & 0xFF)
    return rules.pick_up(slot)


def sweep_that_knows_states_only(slot, sweeper, alive):
    owner = slot.load(Word.OWNER)
    if owner != NOBODY and not alive(owner) and slot.swap(Word.OWNER, owner, sweeper):
        rules.withdraw(slot, rules.sequence_of(slot.load(Word.STATE)))
        rules.release(slot, sweeper)


def release_that_counts_anew(slot, owner):
    slot.store(Word.STATE, state_word(State.FREE, 0))
    rules.release(slot, owner)


def take_before_it_is_done(slot, sequence):
    if rules.sequence_of(slot.load(Word.STATE)) != sequence:
        return None
    _, reply = slot.read_reply()
    rules.withdraw(slot, sequence)
    return reply


class InPlace(PausingSlot):
    """A slot whose reply is written over the request."""

    def __init__(self, slot):
        super().__init__(slot.shared, *slot.at)

    def write_reply(self, sequence, reply):
        self.shared.do("write", *self.at, REQUEST, ((sequence, reply), (sequence, reply)))

    def read_reply(self):
        (sequence, one), (_, other) = self.shared.do("read", *self.at, REQUEST)
        return sequence, (one, other)


WRONG = {
    "a flag for claimed slots beside the owner's word": (
        Rules(claim=claim_by_a_flag, release=release_by_a_flag, sweep=sweep_by_a_flag),
        Setting(),
    ),
    "sweeping by a look at an owner who may be another by now": (
        Rules(sweep=sweep_without_a_second_look),
        Setting(deaths=1, mortals=("client",), tries=1, restarts=False),
    ),
    "sweeping that gives the slot away before it is free": (
        Rules(sweep=sweep_that_gives_the_slot_away_first),
        Setting(deaths=1, mortals=("client",), tries=1),
    ),
    "sweeping that leaves the dead one's request": (
        Rules(sweep=sweep_that_leaves_the_state),
        Setting(deaths=1, mortals=("client",), tries=1),
    ),
    "a time-out taken for a death": (Rules(sweep=sweep_of_the_silent), Setting()),
    "an identity used again": (Rules(identities_are_new=False), Setting(deaths=1, mortals=("client",), clients=1)),
    "an answer to whatever is asked now": (Rules(answer=answer_without_a_number), Setting(timeouts=1, tries=1)),
    "an answer that does not look whether it is still wanted": (
        Rules(answer=answer_without_a_swap),
        Setting(timeouts=1, tries=1),
    ),
    "numbers that begin anew with each owner": (Rules(release=release_that_counts_anew), Setting(timeouts=1, tries=1)),
    "a reply that is taken before it is whole": (Rules(take=take_before_it_is_done), Setting()),
    "a time-out that leaves the request": (Rules(withdraw=lambda slot, sequence: None), Setting(timeouts=1, tries=1)),
    "a server that takes any state word for one of a client": (
        Rules(pick_up=pick_up_that_knows_states_only),
        Setting(vandals=1, clients=1, tries=1),
    ),
    "sweeping that leaves a state that is none": (
        Rules(sweep=sweep_that_knows_states_only),
        Setting(vandals=1, clients=1, tries=1),
    ),
    "no sweeper": (Rules(sweep=lambda slot, sweeper, alive: None), Setting(deaths=1, mortals=("client",), tries=1)),
    "a slot that is taken from an owner who may still write to it": (
        replace(BY_NIXL, sweep=sweep_of_the_silent),
        Setting(),
    ),
    "a server that stores its answer, too": (
        replace(BY_NIXL, answer=answer_without_a_swap),
        Setting(timeouts=1, tries=1),
    ),
    "a reply that is written over the request": (
        Rules(
            take=lambda slot, sequence: rules.take(InPlace(slot), sequence),
            answer=lambda slot, sequence, reply: rules.answer(InPlace(slot), sequence, reply),
        ),
        Setting(timeouts=1, tries=1),
    ),
}


@pytest.mark.parametrize(("wrong", "setting"), WRONG.values(), ids=WRONG)
def test_a_wrong_rule_is_found_out(wrong, setting):
    with pytest.raises(BrokenError) as found:
        Explorer(replace(setting, rules=wrong)).explore()
    assert found.value.steps
