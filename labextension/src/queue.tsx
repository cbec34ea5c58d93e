import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import { queueText } from './format';
import type { IStatus } from './tokens';

/** How many requests wait, and where mine are among them. */
export function Queue(props: {
  status: IStatus;
  trans: TranslationBundle;
}): JSX.Element {
  const { status, trans } = props;
  const waiting = status.others.filter(other => other.state === 'PENDING');
  return (
    <>
      <p>{lengthText(status, trans)}</p>
      {waiting.map(other => (
        <p key={other.id}>
          {trans.__(
            '%1: %2',
            other.display_name || trans.__('the session'),
            queueText(other, Date.now(), trans) ?? ''
          )}
        </p>
      ))}
    </>
  );
}

function lengthText(status: IStatus, trans: TranslationBundle): string {
  const { length, reason } = status.queue;
  if (length === null) {
    return trans.__("The queue can't be read: %1", reason ?? '');
  }
  return length === 0
    ? trans.__('No request is waiting.')
    : trans._n('%1 request is waiting.', '%1 requests are waiting.', length);
}
