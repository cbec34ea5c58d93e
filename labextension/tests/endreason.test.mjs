// What Lab says of the end of its session: why, and what to do next.
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { endReasonText } from '../lib/endreason.js';

const trans = { __: text => text };
const words = changes =>
  endReasonText({ cause: null, message: '', ...changes }, trans);

test('each cause has its words, in whole sentences, and no word of the scheduler', () => {
  for (const cause of [
    'USER',
    'IDLE',
    'TIME_LIMIT',
    'PREEMPTED',
    'OOM',
    'DISK_LIMIT',
    'NODE_LOST',
    'ISOLATION_FAILED',
    'EXITED',
    null
  ]) {
    const text = words({ cause });
    assert.match(text, /^[A-Z].*\.$/, `${cause}`);
    assert.doesNotMatch(text, /node|owner|[A-Z]_[A-Z]/, `${cause}`);
  }
});

test("an administrator's words are the answer", () => {
  assert.equal(
    words({
      cause: 'USER',
      message: 'ended by the administrator root: repair at 15:00'
    }),
    'Ended by the administrator root: repair at 15:00.'
  );
});

test('a cause that this version does not know is told as the service words it', () => {
  assert.equal(
    words({ cause: 'NEW', message: 'something new' }),
    'Something new.'
  );
});
