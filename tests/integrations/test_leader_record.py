"""A route can return the record of an election as it is: it is plain data, and tells no secret."""

from fastapi import FastAPI
from fastapi.testclient import TestClient

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection, LeaderRecord
from grelmicro.leases.identity import process_id
from grelmicro.task import Tasks
from grelmicro.testing import leads
from grelmicro_fastapi import install


def test_a_route_returns_it() -> None:
    leader = LeaderElection("feed", worker="web-1", metadata={"url": "http://x"})
    micro = Grelmicro(uses=[Coordination.from_url("memory://"), Tasks(tasks=[leader])])
    app = FastAPI()
    install(app, micro)

    @app.get("/typed")
    async def typed() -> LeaderRecord | None:
        return leader.record

    @app.get("/nested", response_model=None)
    async def nested() -> dict[str, LeaderRecord | None]:
        return {"record": leader.record}

    with TestClient(app) as client, leads(micro, leader) as term:
        record = client.get("/typed").json()
        assert client.get("/nested").json()["record"]["holder"] == record["holder"]
    assert (record["worker"], record["metadata"], record["fence"]) == ("web-1", {"url": "http://x"}, term.fence)
    worker, _, own = record["holder"].partition(":")
    assert (worker, own.partition(".")[0]) == ("web-1", process_id())
