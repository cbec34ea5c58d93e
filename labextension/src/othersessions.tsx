import * as React from 'react';

import { Ending } from './ending';
import { amountText, isUp, queueText, stateText } from './format';
import { formHref, hubHref } from './links';
import {
  Away,
  Extend,
  type IContext,
  Parking,
  Section,
  SimulatedMark
} from './parts';
import type { ISession, IStatus } from './tokens';

/** The user's other sessions, running and waiting, and the way to one more. */
export function OtherSessions(props: {
  status: IStatus;
  context: IContext;
}): JSX.Element {
  const { status, context } = props;
  const { trans, hub } = context;
  return (
    <Section title={trans.__('Your other sessions')}>
      {status.others.length === 0 ? (
        <p>{trans.__('None.')}</p>
      ) : (
        <ul>
          {status.others.map(session => (
            <OtherSession key={session.id} session={session} context={context} />
          ))}
        </ul>
      )}
      <p>
        <Away href={formHref(hub, status)}>{trans.__('Launch another…')}</Away>
      </p>
    </Section>
  );
}

function OtherSession(props: {
  session: ISession;
  context: IContext;
}): JSX.Element {
  const { session, context } = props;
  const { trans, hub, actions } = context;
  const name = session.display_name || trans.__('the session');
  const queue = queueText(session, Date.now(), trans);
  const isRunning = isUp(session);
  const isWaiting = session.state === 'PENDING';
  const href = hubHref(hub, isRunning ? session.url : session.pending_url);
  const canStop = session.id !== null && session.state !== 'TERMINATING';
  const detail = [amountText(session, trans), session.image_name]
    .filter(part => part !== null)
    .join(' · ');
  return (
    <li className="jp-fgpu-Session">
      <div className="jp-fgpu-SessionHead">
        <strong title={name}>{name}</strong>
        <span
          className={`jp-fgpu-State${isRunning ? ' jp-fgpu-mod-running' : ''}`}
        >
          {stateText(session.state, trans)}
        </span>
      </div>
      <div>
        {detail} {session.simulated && <SimulatedMark trans={trans} />}
      </div>
      {queue !== null && (
        <div title={session.forecast_basis ?? undefined}>{queue}</div>
      )}
      {session.wait_text !== null && (
        <div className="jp-fgpu-Minor">{session.wait_text}</div>
      )}
      {session.pull !== null && (
        <div className="jp-fgpu-Minor">{session.pull.text}</div>
      )}
      {session.message !== null && (
        <div className="jp-fgpu-Minor">{session.message}</div>
      )}
      <Ending session={session} trans={trans} keep={actions.keep} />
      <div className="jp-fgpu-Actions">
        {session.state !== 'TERMINATING' && (
          <Away
            href={href}
            label={
              isRunning
                ? trans.__('Open %1', name)
                : trans.__('Watch the start of %1', name)
            }
          >
            {isRunning ? trans.__('Open') : trans.__('Watch')}
          </Away>
        )}
        <Extend session={session} context={context} />
        <Parking session={session} context={context} />
        {canStop && (
          <button
            type="button"
            aria-label={
              isWaiting
                ? trans.__('Cancel the request %1', name)
                : trans.__('End %1', name)
            }
            onClick={() => actions.stop(session)}
          >
            {isWaiting ? trans.__('Cancel…') : trans.__('End…')}
          </button>
        )}
      </div>
    </li>
  );
}
