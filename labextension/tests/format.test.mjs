// The words of the status bar and the panel. Run by `jlpm test`, which compiles first.
import assert from 'node:assert/strict';
import { test } from 'node:test';

import {
  durationText,
  amountText,
  asSentence,
  computeText,
  contextText,
  endText,
  hoursMinutesText,
  lentText,
  memoryText,
  parkedText,
  parkWarningText,
  problemText,
  problemWithAgeText,
  queueText,
  scriptText,
  staleText,
  stateText,
  statusBarText,
  waitText
} from '../lib/format.js';
import { hubHref, servicePageHref } from '../lib/links.js';

process.env.TZ = 'UTC';

const fill = (text, ...values) =>
  text.replace(/%(\d)/g, (_, n) => String(values[n - 1]));
const trans = { __: fill };

const session = changes => ({
  id: 12,
  display_name: 'gpu-1',
  state: 'RUNNING',
  amount: '0.5 fGPU',
  fgpu: '0.5',
  gpu_memory_mib: 2048,
  gpu_memory_used_mib: null,
  simulated: false,
  position: null,
  expected_start_at_s: null,
  early_start_at_s: null,
  late_start_at_s: null,
  warning: null,
  ends_at_s: null,
  can_keep: false,
  parked: null,
  can_park: false,
  ...changes
});

const reading = (status, changes) => ({
  server: 'ok',
  receivedAt: 0,
  status: {
    hub: 'ok',
    hub_message: null,
    as_of_s: 0,
    session: session(),
    others: [],
    ...status
  },
  ...changes
});

test('remaining time is shown in hours and minutes', () => {
  assert.deepEqual(
    [-5, 59, 60, 3599, 3600, 7199, 7200, 90061].map(s => hoursMinutesText(s, trans)),
    ['0 s', '59 s', '1 min', '59 min', '1 h 0 min', '1 h 59 min', '2 h 0 min', '25 h 1 min']
  );
});

test('the status bar shows the slice and, where known, its use', () => {
  const bar = changes =>
    statusBarText(reading({ session: session(changes) }), 0, trans);
  assert.equal(bar({}), '0.5 fGPU · 2048 MiB');
  assert.equal(bar({ gpu_memory_used_mib: 0 }), '0.5 fGPU · 0 / 2048 MiB');
  assert.equal(bar({ simulated: true }), '0.5 fGPU · 2048 MiB · simulated');
  assert.equal(bar({ amount: null, fgpu: null, gpu_memory_mib: null }), 'fGPU');
});

test('an exact amount is shown as it was asked for', () => {
  const text = changes => amountText(session(changes), trans);
  assert.equal(text({ amount: '5 GiB + 25 %', fgpu: '1.25' }), '5 GiB + 25 %');
  assert.equal(text({ amount: null }), '0.5 fGPU');
  assert.equal(text({ amount: null, fgpu: null }), null);
});

test('the end of a session is a warning only where its owner is warned', () => {
  const now = Date.UTC(2026, 0, 2, 12, 0);
  const text = changes => endText(session(changes), now, trans);
  assert.equal(text({}), null);
  assert.equal(text({ ends_at_s: now / 1000 + 1200 }), 'Ends at 12:20');
  assert.equal(
    text({ ends_at_s: now / 1000 + 600, warning: 'idle: keep it' }),
    'Idle: keep it; it ends at 12:10'
  );
});

test('the status bar names each problem and is silent without a Hub', () => {
  const bar = (status, changes) =>
    statusBarText(reading(status, changes), 0, trans);
  assert.match(bar({ hub: 'unreachable' }), /service down$/);
  assert.match(bar({ hub: 'forbidden' }), /no access$/);
  assert.match(bar({}, { server: 'offline' }), /offline$/);
  assert.equal(bar({}, { server: 'missing' }), 'fGPU: no server extension');
  assert.equal(bar({ session: null }), 'no fGPU');
  assert.equal(bar({ session: null, hub: 'absent' }), null);
  assert.equal(bar({}, { server: 'loading', status: null }), null);
});

test('stale data is shown with its age at this moment', () => {
  const stale = reading({
    hub: 'unreachable',
    hub_message: 'Down.',
    as_of_s: 50
  });
  assert.equal(
    problemWithAgeText(stale, 20_000, trans),
    'Down. You see what it said 1 min ago.'
  );
  assert.equal(problemText(stale, trans), 'Down.');
  assert.equal(staleText(reading({}), 20_000, trans), null);
  assert.equal(staleText(reading({}, { server: 'missing' }), 20_000, trans), null);
  assert.match(problemWithAgeText(reading({}, { server: 'offline' }), 20_000, trans), /^This Jupyter server .* ago\.$/);
  const never = reading({
    hub: 'unreachable',
    hub_message: 'Down.',
    as_of_s: null
  });
  assert.equal(problemWithAgeText(never, 20_000, trans), 'Down.');
  assert.equal(problemWithAgeText(reading({}), 20_000, trans), null);
});

test('a text of the service becomes a sentence', () => {
  assert.equal(asSentence('your last run peaked at 1 GiB'), 'Your last run peaked at 1 GiB.');
  assert.equal(asSentence('Done.'), 'Done.');
});

test('an unknown use is never a zero', () => {
  assert.equal(memoryText(null, 2048, trans), '2048 MiB');
  assert.equal(memoryText(null, null, trans), null);
  assert.equal(memoryText(7, null, trans), '7 MiB used');
});

test('a waiting session shows its position and its expected start', () => {
  const now = Date.UTC(2026, 0, 5, 12, 0);
  const waiting = changes =>
    queueText(session({ state: 'PENDING', ...changes }), now, trans);
  assert.equal(
    waiting({ position: 1, expected_start_at_s: now / 1000 + 8400 }),
    'Next in the queue, about 14:20'
  );
  assert.equal(
    waiting({
      position: 1,
      expected_start_at_s: now / 1000 + 8400,
      forecast_basis: 'time limits'
    }),
    'Next in the queue, at the latest 14:20'
  );
  assert.match(
    waiting({ position: 2, expected_start_at_s: now / 1000 + 86400 }),
    /^2nd in the queue, about Tue.* 12:00$/
  );
  const between = (early, late) =>
    waiting({
      position: 1,
      expected_start_at_s: now / 1000 + 8400,
      early_start_at_s: now / 1000 + early,
      late_start_at_s: now / 1000 + late
    });
  assert.equal(
    between(7200, 16200),
    'Next in the queue, probably between 14:00 and 16:30'
  );
  assert.equal(between(8200, 8700), 'Next in the queue, about 14:20');
  assert.deepEqual(
    [3, 4, 11, 12, 21, 113].map(
      position => waiting({ position }).split(' ', 1)[0]
    ),
    ['3rd', '4th', '11th', '12th', '21st', '113th']
  );
  assert.equal(waiting({}), 'In the queue, start time not known');
  assert.equal(queueText(session(), now, trans), null);
});

test('a cell says that its session waits for the GPU, and for how long', () => {
  const now = Date.UTC(2026, 0, 5, 12, 0);
  const text = changes => waitText(session(changes), now, trans);
  const parked = wanted => ({ state: 'PARKED', parked: { since_s: 0, memory_mib: 1, wanted } });
  assert.equal(text({}), null);
  assert.equal(text(parked(false)), null);
  assert.equal(
    text({ ...parked(true), position: 2 }),
    'This session waits for its GPU. 2nd in the queue, start time not known.'
  );
  assert.equal(
    text({ state: 'RESUMING' }),
    'The GPU is there. Its memory is being copied back.'
  );
});

test('an idle session says when it is parked', () => {
  const text = parks_at_s => parkWarningText(session({ meter: { parks_at_s } }), 0, trans);
  assert.equal(text(299), 'Parked in 4 min if the GPU stays idle. Your variables stay.');
  assert.equal(text(0), null);
  assert.equal(text(null), null);
  assert.equal(parkWarningText(session({ meter: null }), 0, trans), null);
});

test('a parked session says what it keeps, and how it gets its GPU', () => {
  const now = Date.UTC(2026, 0, 5, 12, 0);
  const text = changes => parkedText(session(changes), now, trans);
  const parked = (memory_mib, wanted) => ({
    state: 'PARKED',
    parked: { since_s: 0, memory_mib, wanted }
  });
  assert.equal(text({}), null);
  assert.equal(
    text(parked(6349, false)),
    '6349 MiB of GPU memory kept. Run a cell that uses the GPU to get it.'
  );
  assert.equal(
    text({ ...parked(0, true), position: 1, expected_start_at_s: now / 1000 + 8400 }),
    'No GPU memory is held. Waits for its GPU: Next in the queue, about 14:20'
  );
  assert.equal(
    text({ state: 'RESUMING' }),
    'The GPU memory is being copied back.'
  );
});

test('durations are shown in their largest unit, rounded down', () => {
  assert.deepEqual(
    [0, 59.9, 60, 3599, 7300].map(s => durationText(s, trans)),
    ['0 s', '59 s', '1 min', '59 min', '2 h']
  );
});

test('an unknown state is shown as it came', () => {
  assert.equal(stateText('PENDING', trans), 'Waiting');
  assert.equal(stateText('FROZEN', trans), 'FROZEN');
});

test('links stay on the host of the Hub and honour its prefix', () => {
  const hub = { host: '', prefix: '/jhub/hub/' };
  assert.equal(servicePageHref(hub), '/jhub/services/fgpu/');
  assert.equal(
    servicePageHref({ host: 'https://h', prefix: '/hub/' }),
    'https://h/services/fgpu/'
  );
  assert.equal(hubHref(hub, '/user/a/b/'), '/user/a/b/');
  for (const path of [
    '//evil/',
    '/\\evil',
    'javascript:alert(1)',
    'https://evil/',
    '',
    null
  ]) {
    assert.equal(hubHref(hub, path), null);
  }
  assert.equal(hubHref({ host: '', prefix: '' }, '/user/a/'), null);
});

test('memory of contexts and code is shown where it is known', () => {
  assert.equal(
    contextText({ memory_context_mib: 612 }, trans),
    '612 MiB of it for CUDA contexts and code'
  );
  assert.equal(contextText({ memory_context_mib: null }, trans), null);
  assert.equal(contextText(null, trans), null);
});

test('share and borrowed compute add up to the compute in use', () => {
  const elastic = { compute_lent_percent: 0 };
  const strict = { compute_lent_percent: null };
  assert.equal(computeText(12.4, 30, elastic, trans), '12 of 30 % in use');
  assert.equal(computeText(30.4, 30, strict, trans), '30 of 30 % in use');
  assert.equal(
    computeText(91.6, 30, elastic, trans),
    '92 % in use: 30 % share + 62 % borrowed'
  );
  assert.equal(computeText(33, 30, strict, trans), '33 % in use, your share is 30 %');
});

test('lent compute is shown only if it is known and not zero', () => {
  const lent = percent => ({ compute_lent_percent: percent });
  assert.equal(lentText(9, 30, lent(2.6), trans), 'Others now use 3 % of it');
  for (const [computed, percent] of [[9, 0.4], [9, null], [40, 2.6]]) {
    assert.equal(lentText(computed, 30, lent(percent), trans), null);
  }
});

test('only a failed start script has a message', () => {
  assert.equal(scriptText(null, trans), null);
  assert.equal(scriptText({ state: 'running', status: null }, trans), null);
  assert.equal(scriptText({ state: 'done', status: 0 }, trans), null);
  assert.equal(
    scriptText({ state: 'failed', status: 3 }, trans),
    'Your start script failed with status 3. The session runs on.'
  );
  assert.equal(
    scriptText({ state: 'failed', status: null }, trans),
    'Your variables and start script could not be read. The session runs without them.'
  );
});
