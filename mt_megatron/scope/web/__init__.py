"""The live page's server: loopback only, behind one-time links, Host and Origin checks.

Needs the extra ``scope`` (starlette, uvicorn, websockets); nothing else of the package imports it eagerly.

server    the listening socket, the token file, the line that says how to open it
app       routes: files, data by name, commands, notices
guard     checks before any route, headers of every answer
access    tokens, one-time links, sessions
messages  kinds and bounds of everything that a browser may say
audit     RUN/scope/audit.jsonl
limits    rates, caches with a bound
live      the websocket: notices from a bounded queue
assets    files of the page, in memory
views     data of the page's views
tiles     level of detail of recorded matrices
pack      binary bodies: a header and raw arrays
source    what the page needs of a recording and a run, as Protocols
"""
