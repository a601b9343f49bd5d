"""The page at ``/``: a few files, the same for everybody. What they show comes through the API."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, HTTPException
from starlette.responses import FileResponse

FILES = {path.name: path for path in Path(__file__).with_name("web").iterdir()}
# Nothing comes from elsewhere, and no other site may show the page as a part of its own.
POLICY = "default-src 'self'; frame-ancestors 'none'"
HEADERS = {"cache-control": "no-cache", "content-security-policy": POLICY, "x-content-type-options": "nosniff"}
router = APIRouter(include_in_schema=False)


@router.get("/")
async def page() -> FileResponse:
    return FileResponse(FILES["index.html"], headers=HEADERS)


@router.get("/page/{name}")
async def part(name: str) -> FileResponse:
    if name not in FILES:
        raise HTTPException(404)
    return FileResponse(FILES[name], headers=HEADERS)
