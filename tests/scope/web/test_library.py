"""The page's library in Node.js, without a browser: what it keeps, and how it writes numbers."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from tools.scope_page.build import SOURCE

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="expected node (Node.js) on PATH")


def in_node(script: str) -> Any:
    """Values that ``script`` writes as JSON; it imports from the library's folder."""
    command = ["node", "--input-type=module", "-e", script]
    done = subprocess.run(command, cwd=SOURCE / "src" / "lib", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_bodies_for_an_export_are_bounded_by_their_bytes() -> None:
    """Timelines of thirty steps leave room for what another view asked for."""
    found = in_node("""
        import { MOST_RAW_BYTES, get, raw } from './api.js';
        globalThis.fetch = async (url) => new Response('1'.padEnd(url.includes('timeline') ? 2 ** 21 : 1_000),
          { headers: { 'content-type': 'application/json' } });
        await get('projection', { step: 1 });
        for (let last = 1; last <= 30; last++) await get('timeline', { last });
        const bytes = [...raw.values()].reduce((sum, { buffer }) => sum + buffer.byteLength, 0);
        console.log(JSON.stringify({ bytes, most: MOST_RAW_BYTES, urls: [...raw.keys()] }));
    """)
    assert found["bytes"] <= found["most"] == 24 * 2**20
    assert found["urls"] == ["projection?step=1", *(f"timeline?last={last}" for last in range(20, 31))]


def test_an_answer_that_the_cache_dropped_under_way_is_not_counted() -> None:
    found = in_node("""
        import { get } from './api.js';
        const MIB = 2 ** 20;
        let asked = 0, answer = null;
        const headers = { 'content-type': 'application/json' };
        const sized = (size) => new Response('1'.padEnd(size), { headers });
        globalThis.fetch = (url) => {
          asked += 1;
          if (!url.includes('slow')) return Promise.resolve(sized(36 * MIB));
          return new Promise((done) => { answer = () => done(sized(50 * MIB)); });
        };
        const slow = get('slow');
        for (let step = 1; step <= 5; step++) await get('large', { step });
        answer();
        await slow;
        const before = asked;
        for (let step = 2; step <= 5; step++) await get('large', { step });
        console.log(JSON.stringify({ before, after: asked }));
    """)
    assert found == {"before": 6, "after": 6}


def test_a_step_is_asked_for_again_when_others_have_followed() -> None:
    """Of a step that was the newest when the page was opened other ranks' parts came later."""
    found = in_node("""
        import { freshness, get } from './api.js';
        let parts = 1;
        const headers = { 'content-type': 'application/json' };
        globalThis.fetch = async () => new Response(String(parts), { headers });
        const shown = [];
        for (const [newer, revision] of [[0, 0], [1, 3], [3, 7], [9, 12]]) {
          shown.push(await get('tokens', { step: 5 }, freshness(newer, revision)));
          parts += 1;
        }
        console.log(JSON.stringify(shown));
    """)
    assert found == [1, 2, 3, 3]


def test_curves_of_two_runs_that_are_thinned_apart_have_no_gaps() -> None:
    """But where a value is not finite."""
    found = in_node("""
        import { carried, drawn, pair } from './curves.js';
        const steps = Int32Array.of(2, 4, 8), others = Int32Array.of(1, 2, 5, 7, 9);
        const { x, one, other } = pair(steps, [1, 2, 3], others, [5, 6, NaN, 8, 9]);
        const told = (values) => drawn(values).map((each) => (each === undefined ? 'other' : each));
        const marks = carried(x, steps, [0, 1, 0]), log = drawn([1, 0, -1, Infinity], true);
        console.log(JSON.stringify({ x, one: told(one), other: told(other), marks, log }));
    """)
    assert found == {
        "x": [2, 4, 5, 7, 8],
        "one": [1, 2, "other", "other", 3],
        "other": [6, "other", None, 8, "other"],
        "marks": [0, 1, 1, 1, 0],
        "log": [1, None, None, None],
    }


def test_values_that_are_no_numbers_are_written_as_text() -> None:
    """A step's figures have a truth value and a text beside numbers."""
    found = in_node("""
        import { short } from './format.js';
        const values = [false, true, 'loss is NaN', 2.5, 0, -Infinity, NaN, null];
        console.log(JSON.stringify(values.map((each) => short(each, 6))));
    """)
    assert found == ["false", "true", "loss is NaN", "2.5", "0", "−∞", "NaN", "–"]


def test_an_infinite_error_of_an_encoding_is_not_written_as_none() -> None:
    found = in_node("""
        import { errorBound } from './format.js';
        console.log(JSON.stringify([0, 0.0123, null].map(errorBound)));
    """)
    assert found == ["0", "± 0.012", "± ∞"]
