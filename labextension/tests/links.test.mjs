// Addresses on the Hub's host.
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { restartHref, launchFormHref, saveHref, logHref } from '../lib/links.js';

const hub = { host: '', prefix: '/hub/' };
const status = (user, ...servers) => ({
  user,
  session: { server_name: '' },
  others: servers.map(server_name => ({ server_name }))
});

test('the form for one more session is of a server that there is not yet', () => {
  assert.equal(launchFormHref(hub, status('alice')), '/hub/spawn/alice/gpu-2');
  const found = launchFormHref(hub, status('alice', 'gpu-2', 'gpu-3', 'gpu-5'));
  assert.equal(found, '/hub/spawn/alice/gpu-4');
});

test('options are behind the #, where they start nothing', () => {
  assert.equal(
    launchFormHref(hub, status('a/b@c'), { fgpu: '0.8', image: 'ours & theirs' }),
    '/hub/spawn/a%2Fb%40c/gpu-2#fgpu=0.8&image=ours+%26+theirs'
  );
});

test('there is no form without a Hub, or for a token that is nobody\'s', () => {
  assert.equal(launchFormHref({ host: '', prefix: '' }, status('alice')), null);
  assert.equal(launchFormHref(hub, status(null)), null);
});

test('a session is saved on the page of the service, and ended there if that is asked for', () => {
  const session = { id: 12 };
  assert.equal(saveHref(hub, session), '/services/fgpu/save/12');
  assert.equal(saveHref(hub, session, true), '/services/fgpu/save/12?end=1');
  assert.equal(logHref(hub, session), '/services/fgpu/log/12');
  assert.equal(saveHref({ host: '', prefix: '' }, session), null);
  assert.equal(saveHref(hub, { id: null }), null);
});

test('an ended session is asked for again on the form of its own server, filled in as it was', () => {
  assert.equal(restartHref(hub, status('ali ce')), '/hub/spawn/ali%20ce?again=1');
  const named = { user: 'alice', session: { server_name: 'gpu 2' }, others: [] };
  assert.equal(restartHref(hub, named), '/hub/spawn/alice/gpu%202?again=1');
  assert.equal(restartHref({ host: '', prefix: '' }, named), null);
  assert.equal(restartHref(hub, null), null);
});
