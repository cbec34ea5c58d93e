// The small plot's lines.
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { peak, lineSegments, withNow } from '../lib/plot.js';

const at = (...values) => values.map((value, i) => ({ at_s: 100 + 10 * i, value }));

test('a line goes from the first point to the last, with nothing at the bottom and the most at the top', () => {
  assert.deepEqual(lineSegments(at(0, 50, 100), 100, 10), [
    [[0, 48], [120, 24], [240, 0]]
  ]);
});

test('what is not known is a gap, and never nothing', () => {
  assert.deepEqual(lineSegments(at(100, null, 100), 100, 10), [[[0, 0]], [[240, 0]]]);
});

test('minutes without a point are a gap', () => {
  const points = [...at(100, 100), { at_s: 300, value: 100 }];
  assert.deepEqual(
    lineSegments(points, 100, 10).map(piece => piece.length),
    [2, 1]
  );
});

test('values beyond the scale stay in the picture', () => {
  assert.deepEqual(lineSegments(at(-5, 500), 100, 10), [[[0, 48], [240, 0]]]);
});

const measured = mib => ({ at_s: 100, memory_used_mib: mib, sm_percent: 5 });
const most = points => peak(points.map(p => ({ value: p.memory_used_mib })));

test('the plot never says less than the number above it', () => {
  const points = withNow([measured(0)], { gpu_memory_used_mib: 1300 }, 10);
  assert.equal(most(points), 1300);
  assert.deepEqual(points.map(p => p.at_s), [100, 110]);
});

test('what is not known now adds nothing', () => {
  assert.equal(withNow([measured(7)], { gpu_memory_used_mib: null }, 10).length, 1);
  assert.equal(withNow([], { gpu_memory_used_mib: 7 }, 10).length, 0);
});
