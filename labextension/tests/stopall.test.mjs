// Ending all of one's other sessions. Run by `jlpm test`, which compiles first.
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { stopAll } from '../lib/stopall.js';

const sessions = [
  { id: 1, state: 'RUNNING' },
  { id: 2, state: 'PENDING' },
  { id: 3, state: 'TERMINATING' },
  { id: null, state: 'RUNNING' }
];

test('one refusal is returned and does not stop the others', async () => {
  const asked = [];
  const stop = async id => {
    asked.push(id);
    if (id === 1) {
      throw new Error('Your server has no right to it.');
    }
  };
  assert.deepEqual(await stopAll(sessions, stop), [
    'Your server has no right to it.'
  ]);
  assert.deepEqual(asked, [1, 2]);
});

test('without a refusal there is no message', async () => {
  assert.deepEqual(await stopAll(sessions, async () => undefined), []);
});
