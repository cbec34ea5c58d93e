import * as React from 'react';

import { Ending } from './ending';
import { amountText, isServerRunning, queueText, sessionName } from './format';
import { launchFormHref, hubHref } from './links';
import {
  ExternalLink,
  Extend,
  type ISessionProps,
  type IStatusProps,
  Parking,
  Section,
  SimulatedMark,
  StateMark
} from './parts';

/** The user's other sessions, running and waiting, and the way to one more. */
export function OtherSessions({ status, context }: IStatusProps): JSX.Element {
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
        <ExternalLink href={launchFormHref(hub, status)}>{trans.__('Launch another…')}</ExternalLink>
      </p>
    </Section>
  );
}

function OtherSession({ session, context }: ISessionProps): JSX.Element {
  const { trans, hub, actions } = context;
  const name = sessionName(session, trans);
  const isRunning = isServerRunning(session);
  const isWaiting = session.state === 'PENDING';
  // Parking has the same lines for a parked session.
  const queue = isWaiting ? queueText(session, Date.now(), trans) : null;
  const href = hubHref(hub, isRunning ? session.url : session.pending_url);
  const canStop = session.id !== null && session.state !== 'TERMINATING';
  const detail = [amountText(session, trans), session.image_name]
    .filter(part => part !== null)
    .join(' · ');
  return (
    <li className="jp-fgpu-Session">
      <div className="jp-fgpu-SessionHead">
        <strong title={name}>{name}</strong>
        <StateMark session={session} trans={trans} />
      </div>
      <div>
        {detail} {session.simulated && <SimulatedMark trans={trans} />}
      </div>
      {queue !== null && (
        <div title={session.forecast_basis ?? undefined}>{queue}</div>
      )}
      {isWaiting && session.wait_text !== null && (
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
          <ExternalLink
            href={href}
            label={
              isRunning
                ? trans.__('Open %1', name)
                : trans.__('Watch the start of %1', name)
            }
          >
            {isRunning ? trans.__('Open') : trans.__('Watch')}
          </ExternalLink>
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
