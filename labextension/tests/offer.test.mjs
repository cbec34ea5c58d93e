// Which other amounts a running session is offered, and what is sent for them.
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { offerOf, wantedFrom, wantedOf } from '../lib/offer.js';

const resize = { why_not: null, amounts: ['0.2', '0.3', '0.4'], state: null };
const session = changes => ({
  id: 12,
  amount: '0.3 fGPU',
  fgpu: '0.3',
  gpu_memory_mib: 1152,
  compute_percent: 15,
  resize,
  ...changes
});

test('an amount of fGPU is offered from the least to the most that is possible, in exact steps', () => {
  assert.deepEqual(offerOf(session()), {
    kind: 'fgpu',
    now: '0.3',
    least: '0.2',
    most: '0.4',
    step: '0.1'
  });
  const fine = { ...resize, amounts: ['0.025', '0.05'] };
  assert.equal(offerOf(session({ resize: fine })).step, '0.025');
});

test('where only what it has is possible there is no field', () => {
  for (const amounts of [[], ['0.3']]) {
    const found = offerOf(session({ resize: { ...resize, amounts } }));
    assert.deepEqual(found, { kind: 'nothing' });
  }
});

test('nothing is said of a session that keeps its slice whatever is asked for', () => {
  const fixed = { ...resize, why_not: 'MIG does not.', amounts: [] };
  assert.equal(offerOf(session({ resize: fixed })), null);
  assert.equal(offerOf(session({ resize: null })), null);
  assert.equal(offerOf(session({ id: null })), null);
});

test('exact amounts are asked for in the terms in which they were', () => {
  const exact = changes =>
    offerOf(session({ fgpu: null, resize: { ...resize, amounts: [] }, ...changes }));
  const both = exact({ amount: '1152 MiB + 15 %' });
  assert.deepEqual(both, { kind: 'exact', memoryMib: 1152, computePercent: 15 });
  assert.deepEqual(wantedOf(both, { gpu_memory_mib: '2048', compute_percent: '25' }), {
    gpu_memory_mib: 2048,
    compute_percent: 25
  });
  const memory = exact({ amount: '1152 MiB' });
  assert.deepEqual(wantedOf(memory, { gpu_memory_mib: '2048' }), { gpu_memory_mib: 2048 });
});

test('what was typed is sent as it was: what is wrong with it the service says', () => {
  assert.deepEqual(wantedOf(offerOf(session()), { fgpu: '0.35' }), { fgpu: '0.35' });
});

test('of the options of a larger session the amount alone is asked for, in its terms', () => {
  const common = { image: 'python', cpu: '1' };
  assert.deepEqual(wantedFrom({ ...common, fgpu: '0.8' }), { fgpu: '0.8' });
  const exact = { ...common, gpu_memory_mib: '3072' };
  assert.deepEqual(wantedFrom(exact), { gpu_memory_mib: 3072 });
  assert.deepEqual(wantedFrom({ ...exact, compute_percent: '25' }), {
    gpu_memory_mib: 3072,
    compute_percent: 25
  });
});
