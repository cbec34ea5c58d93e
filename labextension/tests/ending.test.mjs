// The warning before an end, as the panel draws it. Run by `jlpm test`, which compiles first.
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { createElement } from 'react';
import { renderToStaticMarkup } from 'react-dom/server';

import { Ending } from '../lib/ending.js';

process.env.TZ = 'UTC';

const trans = {
  __: (text, ...values) =>
    text.replace(/%(\d)/g, (_, n) => String(values[n - 1]))
};
const session = changes => ({
  id: 12,
  display_name: 'gpu-1',
  warning: null,
  ends_at_s: Date.now() / 1000 + 600,
  can_keep: false,
  parked: null,
  ...changes
});
const warned = changes =>
  session({ warning: 'idle: keep it', can_keep: true, ...changes });

const drawn = (shown, keep = () => undefined) =>
  renderToStaticMarkup(createElement(Ending, { session: shown, trans, keep }));

/** Return the button in what is drawn, or undefined. */
const button = (shown, keep) =>
  [Ending({ session: shown, trans, keep }).props.children]
    .flat()
    .find(child => child?.type === 'button');

test('a session that nobody ends is not spoken of', () => {
  assert.equal(drawn(session({ ends_at_s: null })), '');
});

test('an end that its owner is not warned of yet is a fact, not a warning', () => {
  const html = drawn(session());
  assert.match(html, /Ends at/);
  assert.doesNotMatch(html, /alert|button/);
});

test('a warning is announced, with its reason and its time, and can be answered', () => {
  const html = drawn(warned());
  assert.match(html, /role="alert"/);
  assert.match(html, /Idle: keep it; it ends at/);
  assert.match(html, /aria-label="Keep running gpu-1"[^>]*>Keep running</);
});

test('what nothing averts has no button, and neither has a session without a number', () => {
  const pressed = () => undefined;
  assert.equal(button(warned({ can_keep: false }), pressed), undefined);
  assert.equal(button(warned({ id: null }), pressed), undefined);
  assert.match(drawn(warned({ can_keep: false })), /role="alert"/);
});

test('Keep keeps this very session', () => {
  const kept = [];
  button(warned(), shown => kept.push(shown.id)).props.onClick();
  assert.deepEqual(kept, [12]);
});
