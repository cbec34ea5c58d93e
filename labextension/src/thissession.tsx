import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import { History, ProcessTable } from './details';
import { Ending } from './ending';
import {
  amountText,
  asSentence,
  computeText,
  contextText,
  instantText,
  isServerRunning,
  hoursMinutesText,
  lentText,
  memoryText,
  usedMib
} from './format';
import { logHref, saveHref } from './links';
import {
  ExternalLink,
  Bar,
  Extend,
  type IStatusProps,
  Parking,
  Section,
  SimulatedMark,
  StateMark
} from './parts';
import { Proof } from './proof';
import { Resize } from './resize';
import type { IGpu, IThisSession } from './tokens';

/** The session that this JupyterLab is in. */
export function ThisSession({ status, context }: IStatusProps): JSX.Element {
  const { trans, hub, actions } = context;
  const { session, details } = status;
  if (session === null) {
    return (
      <Section title={trans.__('This session')}>
        <p>{trans.__('This server has no share of a GPU.')}</p>
      </Section>
    );
  }
  return (
    <Section title={trans.__('This session')}>
      {/* Without a warning the end is said once, with what else there is of it. */}
      {session.warning !== null && (
        <Ending session={session} trans={trans} keep={actions.keep} />
      )}
      {session.can_keep && session.can_save && (
        <p>
          <ExternalLink href={saveHref(hub, session, true)}>
            {trans.__('Save as an image and end…')}
          </ExternalLink>
        </p>
      )}
      {session.display_name !== '' && (
        <p>
          <bdi>{session.display_name}</bdi>{' '}
          {session.state !== 'RUNNING' && (
            <StateMark session={session} trans={trans} />
          )}{' '}
          {status.hub === 'ok' && (
            <button type="button" onClick={actions.renameThis}>
              {trans.__('Rename…')}
            </button>
          )}{' '}
          <ExternalLink href={logHref(hub, session)}>{trans.__('Log')}</ExternalLink>
        </p>
      )}
      <Facts session={session} trans={trans} />
      <Parking session={session} context={context} />
      {status.hub === 'ok' && session.resize !== null && (
        <Resize session={session} resize={session.resize} context={context} />
      )}
      <Details status={status} context={context} />
      {details !== undefined && details.advice !== null && (
        <p className="jp-fgpu-Advice">{asSentence(details.advice)}</p>
      )}
      {session.id !== null && isServerRunning(session) && (
        <div className="jp-fgpu-Actions">
          <Extend session={session} context={context} />
          {status.hub === 'ok' && (
            <button type="button" onClick={actions.endThis}>
              {trans.__('End this session…')}
            </button>
          )}
        </div>
      )}
      {session.can_save && (
        <p>
          <ExternalLink href={saveHref(hub, session)}>
            {trans.__('Save this session as an image…')}
          </ExternalLink>
        </p>
      )}
      {session.parked === null && session.state !== 'RESUMING' && (
        <Proof context={context} />
      )}
    </Section>
  );
}

/** The last minutes, and who holds the memory, where they were asked for. */
export function Details({ status, context }: IStatusProps): JSX.Element | null {
  const { trans } = context;
  const { session, details } = status;
  return session === null || details === undefined ? null : (
    <>
      <History session={session} details={details} trans={trans} />
      <ProcessTable processes={details.processes} trans={trans} />
    </>
  );
}

interface IThisSessionProps {
  session: IThisSession;
  trans: TranslationBundle;
}

/** The session's share of the GPU and the part of it that is in use. */
export function Facts({ session, trans }: IThisSessionProps): JSX.Element {
  return (
    <dl>
      <dt>{trans.__('Amount')}</dt>
      <dd className="jp-fgpu-Amount">
        <span>{amountText(session, trans) ?? trans.__('not known')}</span>
        {session.simulated && <SimulatedMark trans={trans} />}
      </dd>
      <dt>{trans.__('GPU memory')}</dt>
      <dd>
        <MemoryUse session={session} trans={trans} />
      </dd>
      <dt>{trans.__('Compute')}</dt>
      <dd>
        <Compute session={session} trans={trans} />
      </dd>
      {session.ends_at_s !== null && (
        <>
          <dt>{trans.__('Time left')}</dt>
          <dd>
            {trans.__(
              '%1, until %2',
              hoursMinutesText(session.ends_at_s - Date.now() / 1000, trans),
              instantText(session.ends_at_s, Date.now())
            )}
          </dd>
        </>
      )}
      <dt>{trans._n('GPU', 'GPUs', Math.max(1, session.gpus.length))}</dt>
      <dd>
        {session.gpus.length === 0
          ? trans.__('not known')
          : session.gpus.map(gpu => <GpuName key={gpu.uuid} gpu={gpu} />)}
      </dd>
    </dl>
  );
}

function GpuName({ gpu }: { gpu: IGpu }): JSX.Element {
  return (
    <div>
      {gpu.model !== null && <div>{gpu.model}</div>}
      <code className="jp-fgpu-Minor">{gpu.uuid}</code>
    </div>
  );
}

/** What the session computes with of the GPU now, held against what it is entitled to. */
function Compute({ session, trans }: IThisSessionProps): JSX.Element {
  const { meter } = session;
  const entitled = meter?.compute_entitled_percent ?? session.compute_percent;
  const computed = meter?.sm_percent ?? null;
  if (meter === null || computed === null) {
    return (
      <>
        <div>
          {entitled !== null
            ? trans.__('%1 %', entitled)
            : session.gpus.length > 0
              ? trans.__('not limited')
              : trans.__('not known')}
        </div>
        {meter?.trouble && (
          <div className="jp-fgpu-Minor">
            {trans.__('Use not known: %1.', meter.trouble)}
          </div>
        )}
      </>
    );
  }
  const text = computeText(computed, entitled, meter, trans);
  const lent = lentText(computed, entitled ?? 100, meter, trans);
  return (
    <>
      <div>{text}</div>
      <Bar
        label={trans.__('Compute in use')}
        text={text}
        percent={Math.min(100, (100 * computed) / (entitled ?? 100))}
      />
      {lent && <div className="jp-fgpu-Minor">{lent}</div>}
    </>
  );
}

function MemoryUse({ session, trans }: IThisSessionProps): JSX.Element {
  const used = usedMib(session);
  const limit = session.gpu_memory_mib;
  const text = memoryText(used, limit, trans) ?? trans.__('not known');
  if (used === null || limit === null || limit <= 0) {
    return (
      <>
        <div>{text}</div>
        {used === null && session.parked === null && (
          <div className="jp-fgpu-Minor">
            {trans.__(
              'Use not known: %1.',
              session.gpu_memory_used_reason ?? ''
            )}
          </div>
        )}
      </>
    );
  }
  const percent = Math.min(100, (100 * used) / limit);
  const own = contextText(session.meter, trans);
  return (
    <>
      <div>{text}</div>
      <Bar
        label={trans.__('GPU memory in use')}
        text={text}
        percent={percent}
        high={percent >= 90}
      />
      {own && <div className="jp-fgpu-Minor">{own}</div>}
    </>
  );
}
