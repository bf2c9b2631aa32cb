"""SQLite file of one node: tables, version, how it is made and how it is opened to read.

Numbers of sessions, paths and entries are the file's own; readers join files by text (``reader``, ``sql``).
A statistic's row keeps the node's combined part, so that nodes combine like ranks; a part of more than
``SHORT`` elements lies in ``vector``, which retention may thin, and the row keeps the node's number.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import quote

from mt_megatron.errors import ScopeError
from mt_megatron.scan.format.permissions import open_private

from .files import keeps_shared_memory

APPLICATION = 0x4D545343
"""SQLite's application_id of our files: the letters MTSC."""

VERSION = 1
"""SQLite's user_version of our files."""

SHORT = 8
"""Elements of a part that a row of ``value`` keeps itself."""

BUSY_SECONDS = 5.0
"""Longest wait of a reader for a lock; of a file with a write-ahead log readers never wait."""

START_SECONDS = 60.0
"""Longest wait of the writer for a lock while it opens the file."""

WRITER_SECONDS = 2.0
"""Longest wait of the writer for a lock in one tick. Without a write-ahead log a long query holds it up, and
meanwhile no further reader is let in: shorter than ``BUSY_SECONDS``, so that those get their turn between
two tries."""

DECLARED_ONCE = "declared_once"
"""Key of ``about``: number of the first session from which on ranks' parts are declared once a start.
Attempts before it have all rows of their own."""

JOURNAL_BYTES = 16 * 2**20
"""Of a journal or log that is not under way."""

TABLES = """
CREATE TABLE about(key TEXT PRIMARY KEY, value) WITHOUT ROWID;
-- One start of the training processes; attempt counts rewinds to an earlier step within it.
CREATE TABLE session(id INTEGER PRIMARY KEY, name TEXT NOT NULL, attempt INTEGER NOT NULL,
  started_ns INTEGER NOT NULL, world_size INTEGER NOT NULL, layout TEXT NOT NULL, model TEXT NOT NULL,
  first_step INTEGER, UNIQUE(name, attempt));
CREATE TABLE rank(session INTEGER, rank INTEGER, place TEXT NOT NULL, host TEXT NOT NULL,
  pid INTEGER NOT NULL, connected_ns INTEGER NOT NULL, bye_ns INTEGER,
  PRIMARY KEY(session, rank)) WITHOUT ROWID;
CREATE TABLE path(id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);
CREATE TABLE module(session INTEGER, rank INTEGER, position INTEGER, path INTEGER NOT NULL,
  class TEXT NOT NULL, parameters INTEGER NOT NULL, PRIMARY KEY(session, rank, position)) WITHOUT ROWID;
CREATE TABLE entry(id INTEGER PRIMARY KEY, path INTEGER NOT NULL, statistic TEXT NOT NULL,
  UNIQUE(path, statistic));
-- Ranks that send parts of an entry: as many parts make a whole value. Said once a start (``declared``).
CREATE TABLE declared(session INTEGER, entry INTEGER, rank INTEGER, length INTEGER NOT NULL,
  PRIMARY KEY(session, entry, rank)) WITHOUT ROWID;
CREATE TABLE step(session INTEGER, step INTEGER, t INTEGER, seconds REAL, loss REAL, grad_norm REAL, lr REAL,
  tokens INTEGER, tokens_per_second REAL, memory_bytes INTEGER, skipped INTEGER NOT NULL,
  ranks INTEGER NOT NULL, PRIMARY KEY(session, step)) WITHOUT ROWID;
CREATE TABLE rank_step(session INTEGER, step INTEGER, rank INTEGER, t INTEGER, seconds REAL,
  memory_bytes INTEGER, PRIMARY KEY(session, step, rank)) WITHOUT ROWID;
-- Steps with statistics.
CREATE TABLE sampled(session INTEGER, step INTEGER, t INTEGER NOT NULL,
  PRIMARY KEY(session, step)) WITHOUT ROWID;
CREATE TABLE value(entry INTEGER, session INTEGER, step INTEGER, parts INTEGER NOT NULL, number REAL,
  part BLOB, PRIMARY KEY(entry, session, step)) WITHOUT ROWID;
CREATE TABLE vector(entry INTEGER, session INTEGER, step INTEGER, part BLOB NOT NULL,
  PRIMARY KEY(entry, session, step)) WITHOUT ROWID;
CREATE TABLE perturbed(session INTEGER, step INTEGER, text TEXT,
  PRIMARY KEY(session, step, text)) WITHOUT ROWID;
CREATE TABLE tensor(id INTEGER PRIMARY KEY, session INTEGER NOT NULL, step INTEGER NOT NULL,
  path INTEGER NOT NULL, what TEXT NOT NULL, microbatch INTEGER NOT NULL, indices TEXT NOT NULL,
  shape TEXT NOT NULL, perturbed TEXT, bytes INTEGER NOT NULL,
  UNIQUE(session, step, path, what, microbatch, indices));
CREATE TABLE shard(id INTEGER PRIMARY KEY, tensor INTEGER NOT NULL, rank INTEGER NOT NULL,
  offset TEXT NOT NULL, shape TEXT NOT NULL, encoding TEXT NOT NULL, tile_rows INTEGER NOT NULL, error REAL,
  UNIQUE(tensor, offset));
-- Rows first .. first + rows - 1 of a shard as a matrix; level 0 as sent, level n blocks of 8^n x 8^n.
CREATE TABLE chunk(shard INTEGER, level INTEGER, first INTEGER, rows INTEGER NOT NULL,
  columns INTEGER NOT NULL, data BLOB NOT NULL, scale BLOB, low BLOB,
  PRIMARY KEY(shard, level, first)) WITHOUT ROWID;
CREATE TABLE tokens(session INTEGER, step INTEGER, path INTEGER, rank INTEGER, microbatch INTEGER,
  sample INTEGER, position INTEGER, parts INTEGER NOT NULL, count INTEGER NOT NULL, best INTEGER NOT NULL,
  ids BLOB NOT NULL, loss BLOB, entropy BLOB,
  lse BLOB, top_ids BLOB, top_logprobs BLOB,
  PRIMARY KEY(session, step, path, rank, microbatch, sample, position)) WITHOUT ROWID;
-- Sums since the session's start; source is 'rank', 'sidecar' or 'checks'.
CREATE TABLE dropped(session INTEGER, source TEXT, rank INTEGER, step INTEGER, t INTEGER NOT NULL,
  frames INTEGER NOT NULL, bytes INTEGER NOT NULL, PRIMARY KEY(session, source, rank, step)) WITHOUT ROWID;
CREATE TABLE alert(id INTEGER PRIMARY KEY, session INTEGER, step INTEGER NOT NULL, t INTEGER NOT NULL,
  kind TEXT NOT NULL, path TEXT NOT NULL, statistic TEXT NOT NULL, value REAL, low REAL, high REAL,
  text TEXT NOT NULL);
CREATE TABLE request(t INTEGER PRIMARY KEY, texts TEXT NOT NULL) WITHOUT ROWID;
-- What retention removed, a row each time.
CREATE TABLE thinned(t INTEGER, kind TEXT NOT NULL, steps INTEGER NOT NULL, first_step INTEGER NOT NULL,
  last_step INTEGER NOT NULL, PRIMARY KEY(t, kind)) WITHOUT ROWID;
"""


def connect_writer(path: Path, *, page_bytes: int = 4096) -> sqlite3.Connection:
    """Connection that writes ``path``, made with all tables where there is no such file.

    With a write-ahead log where readers share memory with this process, else with a rollback journal, whose
    locks network file systems keep. Raises ``ScopeError`` for a file that is not ours or of another version
    and ``sqlite3.Error`` where it cannot be written.
    """
    if path.is_symlink():
        raise FileExistsError(errno.EEXIST, "found a link, expected a file of the recording", str(path))
    if path.exists() and not path.stat().st_size:
        path.unlink()  # left by a disk that was full
    if not path.exists():
        _make(path, page_bytes)
    connection = sqlite3.connect(path, timeout=START_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        check(connection, path)
        mode = "WAL" if keeps_shared_memory(path.parent) else "TRUNCATE"
        connection.execute(f"PRAGMA journal_mode={mode}").fetchone()
        connection.execute("PRAGMA synchronous=NORMAL")
        # Zeros over what is removed, as some builds have it by default, would go through the log.
        connection.execute("PRAGMA secure_delete=FAST").fetchone()
        connection.execute(f"PRAGMA journal_size_limit={JOURNAL_BYTES}")
        connection.execute("PRAGMA trusted_schema=OFF")
        return connection
    except sqlite3.DatabaseError as error:
        connection.close()
        if isinstance(error, sqlite3.OperationalError):
            raise
        raise _damaged(path, error) from error
    except ScopeError:
        connection.close()
        raise


def _make(path: Path, page_bytes: int) -> None:
    """Make ``path`` with all tables; readers see the whole file or none, and of two processes that make it at
    once the first one's stays."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        os.close(open_private(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        connection = sqlite3.connect(draft, isolation_level=None)
        try:
            connection.execute(f"PRAGMA page_size={page_bytes}")
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
            connection.executescript(
                f"BEGIN;{TABLES}PRAGMA application_id={APPLICATION};PRAGMA user_version={VERSION};COMMIT;"
            )
        finally:
            connection.close()
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            os.rename(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def connect_reader(path: Path) -> sqlite3.Connection:
    """Read-only connection, also while the file is written and where its folder cannot be written to.

    A private copy is read where SQLite would have to write beside the file: a write-ahead log's index in a
    folder that this user may not write, or the roll-back of what a killed writer had begun. Raises
    ``ScopeError`` for a file that is not ours, damaged, of another version or locked for long, and
    ``OSError`` where it may not be read.
    """
    # Not by opening it: who closes a file ends all locks that his process has on it (fcntl(2)), and the
    # sidecar, which reads its own file for the page, would lose its writer's.
    os.stat(path)
    if not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    try:
        return _read_only(path)
    except sqlite3.OperationalError as error:
        if is_busy(error):
            raise busy(path) from error
    try:
        with tempfile.TemporaryDirectory(prefix="mt_megatron_scope_") as folder:
            copy = Path(folder) / path.name
            # The journal first: where a new writer rolls the file back meanwhile, the copy does so again.
            _copy(f"{path}-journal", folder, needed=False)
            _copy(str(path), folder)
            _copy(f"{path}-wal", folder, needed=False)
            # All stay open after their names are gone.
            return _read_only(copy, of=path)
    except sqlite3.OperationalError as error:
        raise _damaged(path, error) from error
    except OSError as error:
        raise ScopeError(
            f"{path} can be read from a private copy alone, which cannot be made ({error}); expected files "
            f"that this user may read and room in {tempfile.gettempdir()}. Make room or set TMPDIR"
        ) from error


def _copy(path: str, folder: str, *, needed: bool = True) -> None:
    """Copy ``path`` into ``folder``, by a process of its own: closing it here would end this one's locks."""
    done = subprocess.run(["cp", "--", path, folder], capture_output=True, text=True, errors="replace")
    if done.returncode and (needed or os.path.exists(path)):
        raise OSError(done.stderr.strip())


def _read_only(path: Path, of: Path | None = None) -> sqlite3.Connection:
    """``of``: the file that ``path`` is a private copy of. SQLite itself may write to a copy, to roll back
    what a writer had begun; statements may not."""
    connection = sqlite3.connect(
        f"file:{quote(str(path.resolve()))}?mode={'ro' if of is None else 'rw'}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        connection.execute("PRAGMA query_only=ON")
        connection.execute("PRAGMA trusted_schema=OFF")
        check(connection, of or path)
        return connection
    except sqlite3.OperationalError:
        connection.close()
        raise
    except sqlite3.DatabaseError as error:
        connection.close()
        raise _damaged(of or path, error) from error
    except ScopeError:
        connection.close()
        raise


def check(connection: sqlite3.Connection, path: Path) -> None:
    """Raises ``ScopeError`` where ``connection``'s file is not ours or of another version."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION:
        raise ScopeError(
            f"{path} is an SQLite file, but no recording (application id {application:#x}, expected "
            f"{APPLICATION:#x}); move it out of the folder"
        )
    if version != VERSION:
        raise ScopeError(
            f"{path}: found version {version} of the recording, expected {VERSION}; read it with the "
            "mt_megatron that wrote it, or record into another folder"
        )


def is_full(error: BaseException) -> bool:
    """Whether ``error`` says that the disk has no room."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, sqlite3.OperationalError) and "full" in str(error)


def is_busy(error: BaseException) -> bool:
    """True where ``error`` says that another connection held the lock for too long."""
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


def busy(path: Path) -> ScopeError:
    """The error of a reader of ``path``, a file or its folder, that has waited ``BUSY_SECONDS``."""
    return ScopeError(
        f"{path} is locked: its writer waits for another reader, or writes for long; expected the lock "
        f"within {BUSY_SECONDS:g} s. Try again, or end a long 'scope sql' first"
    )


def _damaged(path: Path, error: sqlite3.Error) -> ScopeError:
    return ScopeError(
        f"{path} cannot be read as a recording ({error}); copy it again with its -wal file beside it, or "
        "move it out of the folder"
    )
