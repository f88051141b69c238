from tests.server.served import make_state


def test_a_state_has_all_that_routes_share() -> None:
    state = make_state()
    assert not state.is_draining
    assert state.admission.num_requests == 0
    assert state.health.stall_s() == 0
    assert b"quire_build_info" in state.metrics.render()
