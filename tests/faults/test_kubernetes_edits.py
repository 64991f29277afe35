"""Leases that somebody edits or deletes by hand while they are held."""

import asyncio
from collections.abc import Callable

import pytest

from grelmicro.backends.kubernetes.names import lease_name
from grelmicro.coordination import Coordination
from tests.helpers.kubernetes_fleet import JOB, KubernetesFleet, lease_of
from tests.helpers.worlds import eventually
from tests.servers.kubernetes import Namespace

pytestmark = pytest.mark.usefixtures("nothing_left")


def deleted(namespace: Namespace) -> None:
    namespace.delete(JOB)


def edited(**spec: object) -> Callable[[Namespace], None]:
    def edit(namespace: Namespace) -> None:
        lease = lease_of(namespace)
        lease["spec"].update(spec)
        namespace.replace(lease)

    return edit


@pytest.mark.parametrize(
    ("edit", "returns"),
    [
        (deleted, True),
        (edited(holderIdentity=""), True),
        (edited(holderIdentity=None), True),
        (edited(holderIdentity="somebody"), False),
        (edited(leaseTransitions=3), False),
    ],
    ids=["deleted", "emptied", "without a holder", "another holder", "set back"],
)
async def test_what_somebody_did_to_the_lease_is_told_at_the_next_renewal(
    fleet: KubernetesFleet, kubernetes_namespace: Namespace, edit: Callable[[Namespace], None], returns: bool
) -> None:
    """Where it is free then, it is taken anew under a higher fence; else when it has ended."""
    leader = await fleet.leading()
    fence = leader.election.guard().fence
    await fleet.let_pass(3.0)
    working = asyncio.create_task(leader.election.lead(asyncio.Event().wait))
    await fleet.settle()
    edit(kubernetes_namespace)
    await fleet.let_pass_unchecked(2.25)
    assert working.done()
    if not returns:
        assert not fleet.leaders
        await fleet.let_pass(16.0)
    await eventually(lambda: fleet.leaders == [leader], "it leads again")
    assert leader.election.guard().fence > fence


async def test_an_edit_of_a_label_ends_nothing(fleet: KubernetesFleet, kubernetes_namespace: Namespace) -> None:
    leader = await fleet.leading()
    fence = leader.election.guard().fence
    for number in range(10):
        label(kubernetes_namespace, JOB, str(number))
        await fleet.let_pass(2.0, step=0.5)
        assert leader.election.guard().fence == fence
    assert lease_of(kubernetes_namespace)["metadata"]["labels"]["edited"] == "9"


async def test_who_holds_a_lock_does_so_whatever_else_is_edited(kubernetes_namespace: Namespace) -> None:
    name = lease_name("grelmicro", "lock:cart")
    async with Coordination.from_url(kubernetes_namespace.url) as coordination:
        handle = await coordination.lock("cart", lease_duration=3600.0).acquire()
        for number in range(3):
            label(kubernetes_namespace, name, str(number))
            await handle.extend()
        label(kubernetes_namespace, name, "last")
        await handle.release()
        assert lease_of(kubernetes_namespace, name)["spec"]["holderIdentity"] == ""
        async with coordination.lock("cart"):
            pass


def label(namespace: Namespace, name: str, text: str) -> None:
    """Edit the label of a Lease."""
    lease = lease_of(namespace, name)
    lease["metadata"]["labels"]["edited"] = text
    namespace.replace(lease)
