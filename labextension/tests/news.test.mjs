// What somebody is told of their sessions, once each, and what is kept of it over a reload.
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { news } from '../lib/news.js';
import { Kept } from '../lib/once.js';

class Storage {
  kept = new Map();
  getItem(key) {
    return this.kept.get(key) ?? null;
  }
  setItem(key, value) {
    this.kept.set(key, value);
  }
}

const one = changes => ({
  id: 13,
  state: 'RUNNING',
  ends_at_s: null,
  warning: null,
  can_keep: false,
  ...changes
});
const status = (others, session = null) => ({ session, others });

/** One tab, which knows nothing but what the browser has kept. */
const tab = storage => (found, now = 0) =>
  news(found, now, new Kept('waiting', storage), new Kept('told', storage)).map(
    ({ kind, session }) => `${kind} ${session.id}`
  );

test('a session that waited and runs is told once, also after a reload', () => {
  const storage = new Storage();
  assert.deepEqual(tab(storage)(status([one({ state: 'PENDING' })])), []);
  assert.deepEqual(tab(storage)(status([one({ state: 'PULLING' })])), []);
  assert.deepEqual(tab(storage)(status([one()])), ['ready 13']);
  assert.deepEqual(tab(storage)(status([one()])), []);
});

test('a session that ran already when the tab was opened is no news', () => {
  assert.deepEqual(tab(new Storage())(status([one()])), []);
});

test('an end that is near is told once, and another end of the same session again', () => {
  const see = tab(new Storage());
  const ends = changes => status([], one({ ends_at_s: 2000, ...changes }));
  assert.deepEqual(see(ends(), 1_000_000), []);
  assert.deepEqual(see(ends(), 1_400_000), ['ends 13']);
  assert.deepEqual(see(ends(), 1_500_000), []);
  const idle = { ends_at_s: 9000, warning: 'idle', can_keep: true };
  assert.deepEqual(see(ends(idle), 1_600_000), ['keep 13']);
  assert.deepEqual(see(ends(idle), 1_700_000), []);
  assert.deepEqual(see(ends({ ...idle, ends_at_s: 12000 }), 2_000_000), ['keep 13']);
});

test('a session that is being ended is not told to end', () => {
  const found = one({ state: 'TERMINATING', ends_at_s: 10, warning: 'idle' });
  assert.deepEqual(tab(new Storage())(status([found])), []);
});

test('without storage, or with something strange in it, a tab remembers by itself', () => {
  const strange = {
    getItem: () => '{"not": "a list"}',
    setItem: () => {
      throw new Error('full');
    }
  };
  for (const storage of [null, strange]) {
    const told = new Kept('told', storage);
    assert.equal(told.first('a'), true);
    assert.equal(told.first('a'), false);
  }
});

test('what is kept does not grow for ever', () => {
  const storage = new Storage();
  const told = new Kept('told', storage);
  for (let i = 0; i < 500; i += 1) {
    told.first(`ends ${i}`);
  }
  assert.equal(told.items.length, 200);
  assert.equal(told.first('ends 499'), false);
});
