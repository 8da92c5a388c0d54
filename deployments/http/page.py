"""The files of the live page. They need no key: they tell nothing, what they show they ask for."""

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

PAGES = {  # path -> file in deployments/dashboard, its type
    "/": ("index.html", "text/html"),
    "/dashboard/app.js": ("app.js", "text/javascript"),
    "/dashboard/draw.js": ("draw.js", "text/javascript"),
    "/dashboard/feed.js": ("feed.js", "text/javascript"),
    "/dashboard/run.js": ("run.js", "text/javascript"),
    "/dashboard/style.css": ("style.css", "text/css"),
    "/dashboard/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def router() -> APIRouter:
    routes = APIRouter()
    folder = files("deployments") / "dashboard"
    for path, (name, kind) in PAGES.items():
        _serve(routes, path, (folder / name).read_bytes(), kind)
    return routes


def _serve(routes: APIRouter, path: str, body: bytes, kind: str) -> None:
    @routes.get(path, include_in_schema=False)
    async def page() -> Response:
        return Response(body, media_type=kind, headers=HEADERS)
