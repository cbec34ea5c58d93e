import type { TranslationBundle } from '@jupyterlab/translation';
import { refreshIcon, VDomRenderer } from '@jupyterlab/ui-components';
import * as React from 'react';

import { Ending } from './ending';
import {
  amountText,
  hubHref,
  type IHubLocation,
  memoryText,
  problemText,
  queueText,
  servicePageHref,
  stateText
} from './format';
import type {
  IFGPUModel,
  IGpu,
  ISession,
  IStatus,
  IThisSession
} from './tokens';

/** What the panel can do beyond showing; each asks the user where something would be lost. */
export interface IPanelActions {
  refresh(): void;
  stop(session: ISession): void;
  keep(session: ISession): void;
}

interface IContext {
  trans: TranslationBundle;
  hub: IHubLocation;
  actions: IPanelActions;
}

/** The side panel: this session, the user's other sessions, the queue. */
export class FGPUPanel extends VDomRenderer<IFGPUModel> {
  constructor(
    model: IFGPUModel,
    private readonly _context: IContext
  ) {
    super(model);
    this.addClass('jp-fgpu-Panel');
  }

  protected render(): JSX.Element {
    const { trans, actions } = this._context;
    const { reading } = this.model;
    const problem = problemText(reading, Date.now(), trans);
    return (
      <>
        <header>
          <h2>{trans.__('GPU share')}</h2>
          <button
            type="button"
            className="jp-fgpu-IconButton"
            title={trans.__('Refresh')}
            aria-label={trans.__('Refresh the GPU share')}
            onClick={actions.refresh}
          >
            <refreshIcon.react tag="span" width="16px" height="16px" />
          </button>
        </header>
        {/* Always present, so that screen readers announce what appears in it. */}
        <div role="status">
          {problem !== null && <p className="jp-fgpu-Problem">{problem}</p>}
        </div>
        {reading.server === 'loading' && <p>{trans.__('Loading…')}</p>}
        {reading.server !== 'missing' && reading.status !== null && (
          <StatusView status={reading.status} context={this._context} />
        )}
      </>
    );
  }
}

function StatusView(props: {
  status: IStatus;
  context: IContext;
}): JSX.Element | null {
  const { status, context } = props;
  const { trans } = context;
  if (status.hub === 'absent' && status.session === null) {
    return null;
  }
  const known = status.as_of_s !== null;
  return (
    <>
      <Section title={trans.__('This session')}>
        {status.session === null ? (
          <p>{trans.__('This server has no share of a GPU.')}</p>
        ) : (
          <>
            <Ending
              session={status.session}
              trans={trans}
              keep={context.actions.keep}
            />
            <ThisSession session={status.session} trans={trans} />
          </>
        )}
      </Section>
      {known && (
        <Section title={trans.__('My other sessions')}>
          {status.others.length === 0 ? (
            <p>{trans.__('None.')}</p>
          ) : (
            <ul>
              {status.others.map(session => (
                <OtherSession
                  key={session.id}
                  session={session}
                  context={context}
                />
              ))}
            </ul>
          )}
        </Section>
      )}
      {status.hub !== 'absent' && (
        <Section title={trans.__('Queue')}>
          {known && <p>{queueLengthText(status, trans)}</p>}
          <ServiceLink context={context} />
        </Section>
      )}
    </>
  );
}

function queueLengthText(status: IStatus, trans: TranslationBundle): string {
  const { length, reason } = status.queue;
  if (length === null) {
    return trans.__('Length not known: %1', reason ?? '');
  }
  return length === 0
    ? trans.__('No request is waiting.')
    : trans._n('%1 request is waiting.', '%1 requests are waiting.', length);
}

function ServiceLink(props: { context: IContext }): JSX.Element | null {
  const href = servicePageHref(props.context.hub);
  return href === null ? null : (
    <a href={href} target="_blank" rel="noopener">
      {props.context.trans.__('All my sessions and the GPUs')}
    </a>
  );
}

function ThisSession(props: {
  session: IThisSession;
  trans: TranslationBundle;
}): JSX.Element {
  const { session, trans } = props;
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
        {session.compute_percent === null
          ? trans.__('not known')
          : trans.__('%1 %', session.compute_percent)}
      </dd>
      <dt>{trans._n('GPU', 'GPUs', Math.max(1, session.gpus.length))}</dt>
      <dd>
        {session.gpus.length === 0
          ? trans.__('not known')
          : session.gpus.map(gpu => <GpuName key={gpu.uuid} gpu={gpu} />)}
      </dd>
    </dl>
  );
}

function GpuName(props: { gpu: IGpu }): JSX.Element {
  const { gpu } = props;
  return (
    <div>
      {gpu.model !== null && <div>{gpu.model}</div>}
      <code className="jp-fgpu-Minor">{gpu.uuid}</code>
    </div>
  );
}

function MemoryUse(props: {
  session: IThisSession;
  trans: TranslationBundle;
}): JSX.Element {
  const { session, trans } = props;
  const used = session.gpu_memory_used_mib;
  const limit = session.gpu_memory_mib;
  const text = memoryText(used, limit, trans) ?? trans.__('not known');
  if (used === null || limit === null || limit <= 0) {
    return (
      <>
        <div>{text}</div>
        {used === null && (
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
  return (
    <>
      <div>{text}</div>
      <div
        className={`jp-fgpu-Bar${percent >= 90 ? ' jp-fgpu-mod-high' : ''}`}
        role="meter"
        aria-label={trans.__('GPU memory in use')}
        aria-valuemin={0}
        aria-valuemax={limit}
        aria-valuenow={Math.min(used, limit)}
        aria-valuetext={text}
      >
        <div style={{ width: `${percent}%` }} />
      </div>
    </>
  );
}

function OtherSession(props: {
  session: ISession;
  context: IContext;
}): JSX.Element {
  const { session, context } = props;
  const { trans, hub, actions } = context;
  const name = session.display_name || trans.__('(default server)');
  const queue = queueText(session, Date.now(), trans);
  const isRunning = session.state === 'RUNNING';
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
      {session.pull_text !== null && (
        <div className="jp-fgpu-Minor">{session.pull_text}</div>
      )}
      {session.message !== null && (
        <div className="jp-fgpu-Minor">{session.message}</div>
      )}
      <Ending session={session} trans={trans} keep={actions.keep} />
      <div className="jp-fgpu-Actions">
        {href !== null && session.state !== 'TERMINATING' && (
          <a
            href={href}
            target="_blank"
            rel="noopener"
            aria-label={
              isRunning
                ? trans.__('Open %1', name)
                : trans.__('Watch the start of %1', name)
            }
          >
            {isRunning ? trans.__('Open') : trans.__('Watch')}
          </a>
        )}
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

function SimulatedMark(props: { trans: TranslationBundle }): JSX.Element {
  return (
    <span
      className="jp-fgpu-Simulated"
      title={props.trans.__('No real GPU is behind these numbers.')}
    >
      {props.trans.__('simulated')}
    </span>
  );
}

function Section(props: {
  title: string;
  children: React.ReactNode;
}): JSX.Element {
  return (
    <section aria-label={props.title}>
      <h3>{props.title}</h3>
      {props.children}
    </section>
  );
}
