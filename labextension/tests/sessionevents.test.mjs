// Events of sessions: each is announced once, also over a reload.
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { newEvents } from '../lib/sessionevents.js';
import { StoredList } from '../lib/storedlist.js';

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
  newEvents(found, now, new StoredList('waiting', storage), new StoredList('announced', storage)).map(
    ({ kind, session }) => `${kind} ${session.id}`
  );

test('a session that waited and runs is announced once, also after a reload', () => {
  const storage = new Storage();
  assert.deepEqual(tab(storage)(status([one({ state: 'PENDING' })])), []);
  assert.deepEqual(tab(storage)(status([one({ state: 'PULLING' })])), []);
  assert.deepEqual(tab(storage)(status([one()])), ['ready 13']);
  assert.deepEqual(tab(storage)(status([one()])), []);
});

test('a session that ran already when the tab was opened is not announced', () => {
  assert.deepEqual(tab(new Storage())(status([one()])), []);
});

test('a near end is announced once, and again if it changes', () => {
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

test('the end of a session that is ending already is not announced', () => {
  const found = one({ state: 'TERMINATING', ends_at_s: 10, warning: 'idle' });
  assert.deepEqual(tab(new Storage())(status([found])), []);
});

test('without usable storage a tab keeps the list in memory', () => {
  const strange = {
    getItem: () => '{"not": "a list"}',
    setItem: () => {
      throw new Error('full');
    }
  };
  for (const storage of [null, strange]) {
    const announced = new StoredList('announced', storage);
    assert.equal(announced.addNew('a'), true);
    assert.equal(announced.addNew('a'), false);
  }
});

test('a stored list has a size limit', () => {
  const storage = new Storage();
  const announced = new StoredList('announced', storage);
  for (let i = 0; i < 500; i += 1) {
    announced.addNew(`ends ${i}`);
  }
  assert.equal(announced.items.length, 200);
  assert.equal(announced.addNew('ends 499'), false);
});
