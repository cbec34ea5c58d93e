// Addresses on the Hub's host.
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { formHref } from '../lib/links.js';

const hub = { host: '', prefix: '/hub/' };
const status = (user, ...servers) => ({
  user,
  session: { server_name: '' },
  others: servers.map(server_name => ({ server_name }))
});

test('the form for one more session is of a server that there is not yet', () => {
  assert.equal(formHref(hub, status('alice')), '/hub/spawn/alice/gpu-2');
  const found = formHref(hub, status('alice', 'gpu-2', 'gpu-3', 'gpu-5'));
  assert.equal(found, '/hub/spawn/alice/gpu-4');
});

test('options are behind the #, where they start nothing', () => {
  assert.equal(
    formHref(hub, status('a/b@c'), { fgpu: '0.8', image: 'ours & theirs' }),
    '/hub/spawn/a%2Fb%40c/gpu-2#fgpu=0.8&image=ours+%26+theirs'
  );
});

test('there is no form without a Hub, or for a token that is nobody\'s', () => {
  assert.equal(formHref({ host: '', prefix: '' }, status('alice')), null);
  assert.equal(formHref(hub, status(null)), null);
});
