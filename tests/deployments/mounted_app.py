"""A root application with a lifespan of its own, applications mounted below it, and a router.

PATH_OF_STORE is the file of a SQLite store; what opens and closes is written into the file that DIARY names.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, FastAPI

from grelmicro import Grelmicro
from grelmicro.backends.sqlite import SQLiteStore
from grelmicro.coordination import Coordination, LockHandle
from grelmicro_fastapi import LockDep, install, lifespan
from tests.helpers.programs import Diary

diary = Diary(Path(os.environ["DIARY"]))


class Noted(SQLiteStore):
    """A store that notes when it is really opened and closed."""

    async def open(self) -> None:
        diary.note("store opens")
        await super().open()

    async def close(self) -> None:
        await super().close()
        diary.note("store closes")


store = Noted(os.environ["PATH_OF_STORE"])
micro = Grelmicro(uses=[Coordination(store)])
other = Grelmicro(uses=[Coordination(store)])

CartLock = Annotated[LockHandle, LockDep("cart:{cart_id}", timeout=0)]
router = APIRouter()


@router.get("/carts/{cart_id}")
async def show(cart_id: int, held: CartLock, seconds: float = 0) -> str:
    """Hold a cart for some seconds."""
    if seconds:
        diary.note("held")
    await asyncio.sleep(seconds)
    return held.name


@asynccontextmanager
async def own(app: FastAPI) -> AsyncIterator[None]:
    """The root's own lifespan."""
    diary.note(f"root starts, open: {micro.is_open} {other.is_open}")
    yield
    diary.note(f"root ends, open: {micro.is_open} {other.is_open}")


def mounted(micro: Grelmicro) -> FastAPI:
    """An application whose lifespan no server runs."""
    app = FastAPI()
    install(app, micro)
    app.include_router(router)
    return app


app = FastAPI(lifespan=lifespan(other, own))
install(app, micro)
app.include_router(router)
app.mount("/first", mounted(micro))
app.mount("/second", mounted(other))

without_install = FastAPI()
without_install.mount("/below", mounted(Grelmicro(uses=[Coordination(store)])))
