// The other amounts that a running session can request.
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { requestFromFields, requestFromOptions, resizeOffer } from '../lib/offer.js';

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
  assert.deepEqual(resizeOffer(session()), {
    kind: 'fgpu',
    now: '0.3',
    min: '0.2',
    max: '0.4',
    step: '0.1'
  });
  const fine = { ...resize, amounts: ['0.025', '0.05'] };
  assert.equal(resizeOffer(session({ resize: fine })).step, '0.025');
});

test('there is no field if only the current amount is possible', () => {
  for (const amounts of [[], ['0.3']]) {
    const found = resizeOffer(session({ resize: { ...resize, amounts } }));
    assert.deepEqual(found, { kind: 'none' });
  }
});

test('a session with a fixed amount has no offer', () => {
  const fixed = { ...resize, why_not: 'MIG does not.', amounts: [] };
  assert.equal(resizeOffer(session({ resize: fixed })), null);
  assert.equal(resizeOffer(session({ resize: null })), null);
  assert.equal(resizeOffer(session({ id: null })), null);
});

test('exact amounts keep the units of the first request', () => {
  const exact = changes =>
    resizeOffer(session({ fgpu: null, resize: { ...resize, amounts: [] }, ...changes }));
  const both = exact({ amount: '1152 MiB + 15 %' });
  assert.deepEqual(both, { kind: 'exact', memoryMib: 1152, computePercent: 15 });
  assert.deepEqual(requestFromFields(both, { gpu_memory_mib: '2048', compute_percent: '25' }), {
    gpu_memory_mib: 2048,
    compute_percent: 25
  });
  const memory = exact({ amount: '1152 MiB' });
  assert.deepEqual(requestFromFields(memory, { gpu_memory_mib: '2048' }), { gpu_memory_mib: 2048 });
});

test('the typed amount is sent unchanged: the service checks it', () => {
  assert.deepEqual(requestFromFields(resizeOffer(session()), { fgpu: '0.35' }), { fgpu: '0.35' });
});

test('the request from options of a launch has only their amount', () => {
  const common = { image: 'python', cpu: '1' };
  assert.deepEqual(requestFromOptions({ ...common, fgpu: '0.8' }), { fgpu: '0.8' });
  const exact = { ...common, gpu_memory_mib: '3072' };
  assert.deepEqual(requestFromOptions(exact), { gpu_memory_mib: 3072 });
  assert.deepEqual(requestFromOptions({ ...exact, compute_percent: '25' }), {
    gpu_memory_mib: 3072,
    compute_percent: 25
  });
});
