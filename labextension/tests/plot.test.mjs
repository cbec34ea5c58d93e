// The small plot's lines.
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { pieces } from '../lib/plot.js';

const at = (...values) => values.map((value, i) => ({ at_s: 100 + 10 * i, value }));

test('a line goes from the first point to the last, with nothing at the bottom and the most at the top', () => {
  assert.deepEqual(pieces(at(0, 50, 100), 100, 10), [
    [[0, 48], [120, 24], [240, 0]]
  ]);
});

test('what is not known is a gap, and never nothing', () => {
  assert.deepEqual(pieces(at(100, null, 100), 100, 10), [[[0, 0]], [[240, 0]]]);
});

test('minutes without a point are a gap', () => {
  const points = [...at(100, 100), { at_s: 300, value: 100 }];
  assert.deepEqual(
    pieces(points, 100, 10).map(piece => piece.length),
    [2, 1]
  );
});

test('values beyond the scale stay in the picture', () => {
  assert.deepEqual(pieces(at(-5, 500), 100, 10), [[[0, 48], [240, 0]]]);
});
