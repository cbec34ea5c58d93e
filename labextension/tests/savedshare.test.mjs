// What a saved notebook shows of its session. Run by `jlpm test`, which compiles first.
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { isThisSession, savedShare } from '../lib/savedshare.js';

const data = { text: 'Amount: 0.5 fGPU', at_s: 1790000000, session: 12 };

test('only in its own session what is now stands in its place', () => {
  const saved = savedShare(data);
  assert.equal(isThisSession(saved, { session: { id: 12 } }), true);
  assert.equal(isThisSession(saved, { session: { id: 13 } }), false);
  assert.equal(isThisSession(saved, { session: null }), false);
  assert.equal(isThisSession(savedShare({ text: 'x' }), { session: { id: null } }), false);
});

test('anything may be in a file', () => {
  for (const bad of [undefined, null, 7, 'x', { text: 7, at_s: 'x', session: '12' }, { at_s: 1e300 }]) {
    assert.deepEqual(savedShare(bad), { text: '', atS: null, session: null });
  }
  assert.deepEqual(savedShare(data), { text: data.text, atS: 1790000000, session: 12 });
});
