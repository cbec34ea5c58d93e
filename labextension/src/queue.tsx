import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import { queueText, sessionName } from './format';
import type { IStatusProps } from './parts';
import type { IStatus } from './tokens';

/** How many requests wait, and where mine are among them. */
export function Queue({ status, context }: IStatusProps): JSX.Element {
  const { trans } = context;
  const waiting = status.others.filter(other => other.state === 'PENDING');
  return (
    <>
      <p>{lengthText(status, trans)}</p>
      {waiting.map(other => (
        <p key={other.id}>
          {trans.__(
            '%1: %2',
            sessionName(other, trans),
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
